"""`python -m dcpbench.report compare OLD NEW...`: which verdicts changed, and which costs beyond noise.

`environments`, `verdicts` and `costs` each hold one side against the other; `comparison` puts them together,
`sections` says them. Costs come as tables from `measured`, and are judged by `statistics`.
"""
