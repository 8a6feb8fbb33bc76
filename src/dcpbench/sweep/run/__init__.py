"""A sweep at work: jobs to ranks, and outcomes to rows."""
