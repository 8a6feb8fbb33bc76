"""What one rank does in a cell: build, train, save, load and check. Scenarios are written with it."""
