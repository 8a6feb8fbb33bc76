"""The schema of `conf/`, mesh arithmetic, and errors of the configuration. No torch."""
