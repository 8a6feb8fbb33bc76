"""Find the first torch in which a cell breaks."""
