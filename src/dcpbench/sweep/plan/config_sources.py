"""Hydra's configuration files, read once for all jobs: half of what a composition takes is reading them."""

import copy
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath


def read_once(loader: ConfigLoader) -> ConfigLoader:
    """The same loader, which from now on reads each file of its search path once."""
    made = copy.copy(loader)
    cast("Any", made).repository = _ReadOnce(cast("Any", loader).repository)
    return made


def keeps_to_its_group(loader: ConfigLoader, path: str) -> bool:
    """Whether a value of a group (`parallel/ddp`) is known to set nothing but its group's own part of the
    configuration: it names no other package, and no further values but those that it takes as its own."""
    found = cast("Any", loader).repository.load_config(path)
    if found is None or found.header.get("package") not in (None, "_group_"):
        return False
    further = [item for item in found.defaults_list or () if not item.is_self()]
    here = [item for item in further if item.package == ""]  # as Hydra has `_here_`
    return here == further and all(
        keeps_to_its_group(loader, f"{item.group}/{item.value}".lstrip("/")) for item in here
    )


class _ReadOnce:
    """What Hydra asks for files, a `hydra._internal.config_repository.IConfigRepository`.

    Hydra makes a copy of it for each composition, and changes what it got: so the copy is this very object,
    and gives copies itself.
    """

    def __init__(self, repository: Any) -> None:
        self._repository = copy.deepcopy(repository)
        self._searched: list[Any] = []
        self._read: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> "_ReadOnce":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repository, name)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        searched = [(element.provider, element.path) for element in config_search_path.get_path()]
        if searched != self._searched:
            self._repository.initialize_sources(config_search_path)
            self._searched, self._read = searched, {}

    def load_config(self, config_path: str) -> Any:
        if config_path not in self._read:
            self._read[config_path] = self._repository.load_config(config_path=config_path)
        return copy.deepcopy(self._read[config_path])
