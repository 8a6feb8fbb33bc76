"""Whether what came back is what was saved: live state, digests, comparison, audit, controls."""
