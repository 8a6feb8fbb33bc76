"""Values from rows: frames, queries, statistics, comparisons, histories. No text and no torch."""
