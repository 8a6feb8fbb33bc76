"""One rank's part of a cell: build, train, save, load and check. Scenarios are written with it."""
