"""Defects and components that tests inject into real cells; reached by `--config-dir tests/conf`, like users' code."""
