"""What a cell leaves behind: rows, columns, metrics, checks, findings, and how they are stored. No torch."""
