"""Imported last by the server of the tests: what every driver would do again after it was forked from there.

It reads the list of known failures, and looks for garbage among all that the server has imported.
"""

import gc

from dcpbench.core.plugins import load_plugins
from dcpbench.sweep import known_failures

load_plugins()
known_failures.listed()
gc.collect()
gc.freeze()
