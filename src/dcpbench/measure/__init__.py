"""Clocks, memory, bytes, and what plain files reach."""
