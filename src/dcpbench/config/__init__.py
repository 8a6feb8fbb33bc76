"""The schema of conf/, mesh arithmetic, and what identifies a cell. No torch."""
