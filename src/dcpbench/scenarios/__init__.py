"""The scenarios, which cells run: each is a list of stages."""
