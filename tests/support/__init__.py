"""Defects and components injected into real cells; reached by `--config-dir tests/conf`, like users' code."""
