"""Hydra finds the launcher and the sweeper here by their place; there is nothing to configure."""
