"""A sweep's folder: claimed, described, resumed, put together from parts."""
