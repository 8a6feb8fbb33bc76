"""A sweep's folder: claimed, described, resumed."""
