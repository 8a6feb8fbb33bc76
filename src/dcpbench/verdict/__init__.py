"""From how the stages of a cell ended to one status with a reason. Pure functions; no torch."""
