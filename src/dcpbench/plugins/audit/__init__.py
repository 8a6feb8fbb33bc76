"""Check whether checkpoint folders are complete."""
