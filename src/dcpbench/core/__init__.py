"""What is declared once, as axes, statuses and checks, and the values that rooms share. No torch."""
