"""dcpbench: an experiment matrix for PyTorch Distributed Checkpoint, one trustworthy row per cell."""

__version__ = "0.1.0"
