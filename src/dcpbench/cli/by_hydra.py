"""Let Hydra read the configuration of a sweep."""

import os
import random
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from dcpbench.code.provenance import conf_folders
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder, schema_class
from dcpbench.sweep.request import Request, value_of
from dcpbench.sweep.run import run_sweep


def random_seeds(count: int) -> str:
    """Return different seeds, as a list on the command line."""
    return ",".join(map(str, random.SystemRandom().sample(range(1_000_000), count)))


def register_groups(config_dir: Path | None = None, asked: str = "") -> None:
    """Register with Hydra the schema, every parallelism as a value of `load_parallel`, what plug-ins add to
    experiments, and the function `${random_seeds:10}` for experiments.

    Args:
        own: the user's `--config-dir`.
        asked: the name of the experiment.

    Raises:
        ConfigError: the experiment names another sweeper or launcher; Hydra would ignore some.
    """
    OmegaConf.register_new_resolver("random_seeds", random_seeds, use_cache=True, replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=schema_class())
    folders = conf_folders()
    searched = [*folders, config_dir] if config_dir else folders
    for path in (folder / f"experiment/{asked}.yaml" for folder in searched):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if setting := re.search(r"^[^#\n]*(hydra/(sweeper|launcher)|_target_)", text, re.MULTILINE):
            why = f"{setting[1]} is that of dcpbench, which starts cells itself; leave it out"
            raise ConfigError(f"experiment={asked}: {why}")
    for path in (path for folder in searched for path in sorted(folder.glob("parallel/*.yaml"))):
        same = {"defaults": [{"/parallel@_here_": path.stem}, "_self_"]}
        store.store(group="load_parallel", name=path.stem, node=same)
    for experiment in conf_folder().glob("experiment/*.yaml"):
        group = f"experiment/{experiment.stem}"
        added = [path.stem for folder in folders for path in sorted(folder.glob(f"{group}/*.yaml"))]
        store.store(group=group, name="plugins", node={"defaults": added}, package="_global_")


def start(request: Request, cfg: str | None) -> None:
    """Let Hydra compose the sweep, whose sweeper runs it; or let it print a part of the configuration.

    Raises:
        SystemExit: with the exit status of the sweep; or Hydra cannot print, and has reported why.
    """
    # Hydra then raises instead of printing its own, longer, message.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Without --multirun Hydra takes what it cannot compose for a single job, and complains about its lists.
    sys.argv[1:] = [f"--cfg={cfg}" if cfg else "--multirun", *request.words]
    register_groups(request.config_dir, str(value_of("experiment", request.overrides) or ""))
    main = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")
    main(partial(_run, request))()


def _run(request: Request, loader: ConfigLoader, base: DictConfig) -> int:
    return run_sweep(replace(request, loader=loader, base=base))
