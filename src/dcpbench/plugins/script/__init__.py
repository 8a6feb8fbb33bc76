"""Script: stop a user's own training script, resume it, and compare the two runs."""
