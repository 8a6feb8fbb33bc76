"""What a user asked for that cannot be run."""


class ConfigError(Exception):
    """What the user asked for cannot be run as it stands: one line for the terminal, exit status 2."""
