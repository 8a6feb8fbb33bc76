"""Ranks on many hosts."""
