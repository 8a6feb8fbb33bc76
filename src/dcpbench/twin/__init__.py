"""The training verdict: a second run, unsharded, that takes the same steps."""
