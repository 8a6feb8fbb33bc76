"""Checkpointers beside DCP."""
