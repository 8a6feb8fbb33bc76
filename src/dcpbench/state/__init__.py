"""A run's live state, read without the library under test: snapshots, layouts, digests, flags."""
