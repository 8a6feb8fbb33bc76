"""Injected faults. If no check detects one, dcpbench has a bug."""
