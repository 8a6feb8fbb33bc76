"""What a cell does: each scenario is a short story of phases."""
