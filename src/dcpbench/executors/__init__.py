"""Executors start ranks, send them stages, enforce time limits and end them."""
