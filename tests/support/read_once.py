"""Imported last by the server of the tests: what every driver would do again after it was forked from there.

It reads the list of known failures, and looks for garbage among all that the server has imported. The server
adopts orphans, so that what a driver leaves behind counts in the CPU seconds of the test that started it.
"""

import gc
import warnings

from dcpbench.core.plugins import load_plugins
from dcpbench.executors import cleanup
from dcpbench.sweep import known_failures

cleanup.adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
load_plugins()
known_failures.listed()
gc.collect()
gc.freeze()
