"""Which code a sweep runs: found without being imported, and compared with that of other sweeps."""
