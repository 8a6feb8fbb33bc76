"""Snapshots of live state, digests, comparisons with their controls, and audits of files on disk."""
