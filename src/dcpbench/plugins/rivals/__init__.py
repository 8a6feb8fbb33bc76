"""Checkpointers other than DCP."""
