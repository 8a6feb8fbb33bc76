"""Files of checkpoints, read without DCP: metadata, headers, chunks, audits."""
