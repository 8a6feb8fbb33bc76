"""Words to cells: configurations composed, combined, and checked for what cannot run."""
