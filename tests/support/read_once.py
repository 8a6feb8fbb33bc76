"""Imported last by the server of the tests: what every driver would do again after it was forked from there.

It reads the list of known failures, and looks for garbage among all that the server has imported.
"""

import gc

from dcpbench.config.schema import conf_folder
from dcpbench.sweep.plan import known_failures

known_failures.read(conf_folder() / "known_failures.yaml")
gc.collect()
gc.freeze()
