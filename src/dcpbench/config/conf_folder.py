"""Where `conf/` lies."""

from pathlib import Path

from dcpbench.config.errors import ConfigError


def conf_folder() -> Path:
    """The installed package's own `conf`, else the checkout's.

    Raises:
        ConfigError: there is neither.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml beside {here}: the installation is not whole")
