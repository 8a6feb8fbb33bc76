"""Rows in, tables and pictures out; needs pandas, and neither torch nor the rest of the house."""
