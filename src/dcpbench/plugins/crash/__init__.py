"""Record a save, enumerate the disk contents that a crash can leave, load each, and count the results."""
