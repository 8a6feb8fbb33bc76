"""What a cell does: each scenario a short, readable story of phases."""
