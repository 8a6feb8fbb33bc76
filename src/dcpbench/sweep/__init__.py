"""The driver: the cells of the product, their validity, the ranks, time-outs, progress, rows."""
