"""The scenarios, which cells run: each is a short story of phases."""
