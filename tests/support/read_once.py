"""Imported last by the agents of the tests: what every driver would do again after it was forked from there.

It reads the list of known failures, and looks for garbage among all that the agent has imported. The agent
adopts orphans, so that what a driver leaves behind counts in the CPU seconds of the test that started it.
"""

import gc

from dcpbench.core.plugins import load_plugins
from dcpbench.executors import cleanup
from dcpbench.plan import known_failures

cleanup.adopt_orphans()
load_plugins()
known_failures.default_list()
gc.collect()
gc.freeze()
