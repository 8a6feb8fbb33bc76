"""`python -m dcpbench.report thin <folder>`: old sweeps take less room, or go, when asked to.

`retention` decides which sweeps stay, `discard` removes what may go.
"""
