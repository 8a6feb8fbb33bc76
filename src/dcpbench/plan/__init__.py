"""Cells to a plan: identities, known failures, limits of the machine."""
