"""What is saved (state), how (saving), and where (storage)."""
