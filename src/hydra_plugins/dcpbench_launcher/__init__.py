"""Hydra finds the launcher and the sweeper by the place of this package."""
