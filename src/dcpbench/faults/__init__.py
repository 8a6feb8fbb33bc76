"""Defects planted on purpose: a row whose fault goes unseen is a fault of ours.

Each is one short function and one YAML in `conf/fault/`, which says where it is planted (`at`), what
check has to see it, and what name has to stand in the row's reason. Where it can, a defect is on one
rank that is not 0: what is seen on rank 0 alone is no proof.
"""
