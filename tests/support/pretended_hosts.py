"""An engine of this host that refuses no number of hosts."""

from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.local import LocalEngine


class PretendedHosts(LocalEngine):
    """This host, as if it were as many as are asked for."""

    def __init__(self, _: ExecutorConfig) -> None:
        """Refuse nothing."""
