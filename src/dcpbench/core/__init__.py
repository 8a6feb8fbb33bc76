"""Values that ranks, executors, the verdict and the driver share, and the registries; no torch."""
