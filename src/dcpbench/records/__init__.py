"""Rows of cells, and the files that store them. No torch."""
