"""The groups that the tests of plug-ins bring, in `tests/plugins/<name>/conf/`; Hydra finds this file by its
place."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class TestsSearchPath(SearchPathPlugin):
    """Adds them after those of the plug-ins themselves."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in sorted(Path(__file__).parents[1].glob("plugins/*/conf")):
            search_path.append("tests", f"file://{folder}")
