"""A sweep, from overrides to rows."""
