"""Axes, statuses, checks and limits, each declared once, and the values that all rooms share. No torch."""
