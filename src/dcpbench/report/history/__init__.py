"""`python -m dcpbench.report history <folder>...`: how each cell's status and costs went over many sweeps.

`rows` reads, `flat` the quick way; `cells` makes matrices of cells by sweeps; `changes` finds where a cost
changed for good; `story` chooses what is told; `terminal` and `written` say it.
"""
