"""Whether what came back is what was saved: comparison, oracles, planted faults, the verdict."""
