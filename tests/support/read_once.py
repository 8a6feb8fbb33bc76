"""Imported last by the agents of the tests: what every driver would do again after it was forked from there.

It reads the lists of known failures and of installed packages, and looks for garbage among all that the agent
has imported. The agent adopts orphans, so that what a driver leaves behind counts in the CPU seconds of the
test that started it.
"""

import gc
import sys

from dcpbench.code import provenance
from dcpbench.core.plugins import load_plugins
from dcpbench.executors import cleanup
from dcpbench.plan import known_failures

cleanup.adopt_orphans()
load_plugins()
known_failures.default_list()
provenance.distributions_of(tuple(sys.path))
gc.collect()
gc.freeze()
