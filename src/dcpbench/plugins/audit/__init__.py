"""Whether checkpoint folders are whole."""
