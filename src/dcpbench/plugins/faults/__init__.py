"""Defects planted on purpose: a row whose fault goes unseen is a fault of ours."""
