"""Known defects of torch, recomputed. The key `by` in `conf/known_failures.yaml` names a file, and
`docs/findings/` describes the defects."""
