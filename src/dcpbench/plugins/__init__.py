"""The plug-ins of this tree: each a folder that can be deleted, with `plugin.py`, code and `conf/`."""
