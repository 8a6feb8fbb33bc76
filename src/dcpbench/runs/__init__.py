"""Who trains: dcpbench's loop, a user's trainer, and the state that a run has."""
