"""The group `fault`, whose values are declared in Python beside the functions that plant them."""

from dataclasses import asdict

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

_GROUP = "fault"


class FaultSource(ConfigSource):
    """What `hydra.searchpath` names as `faults://`. Not the ConfigStore, all of which Hydra copies for every
    group that it lists."""

    @staticmethod
    def scheme() -> str:
        return "faults"

    def load_config(self, config_path: str) -> ConfigResult:
        from dcpbench.faults.registry import load_faults

        config = OmegaConf.create(asdict(load_faults()[_name(config_path)]))
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", _GROUP)

    def is_config(self, config_path: str) -> bool:
        from dcpbench.faults.registry import load_faults

        return config_path.startswith(f"{_GROUP}/") and _name(config_path) in load_faults()

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        from dcpbench.faults.registry import load_faults

        if config_path == "":
            return [] if results_filter is ObjectType.CONFIG else [_GROUP]
        faults = config_path == _GROUP and results_filter is not ObjectType.GROUP
        return [*load_faults()] if faults else []


def _name(config_path: str) -> str:
    return config_path.removeprefix(f"{_GROUP}/").removesuffix(".yaml")
