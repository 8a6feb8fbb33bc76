"""The first torch in which a cell breaks."""
