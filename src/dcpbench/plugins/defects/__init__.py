"""Known defects of torch, recomputed: a file each, under the name that `by` has in
`conf/known_failures.yaml`. `docs/findings/` describes them."""
