"""Declarations of axes, statuses, checks and metrics, and the values that packages share. No torch."""
