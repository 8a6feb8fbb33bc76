"""Comparisons, each with its control: leaves, across layouts, with stored files, losses."""
