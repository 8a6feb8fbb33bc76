"""The process of a rank."""
