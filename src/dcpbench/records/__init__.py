"""Rows of cells, the files that store them, and the code that ran. No torch."""
