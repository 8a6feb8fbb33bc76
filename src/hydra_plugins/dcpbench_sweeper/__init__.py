"""Hydra finds the sweeper by the place of this package."""
