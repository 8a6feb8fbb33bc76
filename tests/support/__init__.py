"""What tests plant into real cells; reached through `--config-dir tests/conf`, as a user's own code is."""
