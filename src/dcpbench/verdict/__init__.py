"""The verdict: from the ends of a cell's stages to one status with a reason. Pure functions; no torch."""
