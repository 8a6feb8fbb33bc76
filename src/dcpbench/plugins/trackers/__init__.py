"""Rows, where a team looks at its runs anyway."""
