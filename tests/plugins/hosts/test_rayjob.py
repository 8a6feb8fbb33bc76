"""The manifest for Kubernetes: where its pods write, and with whom they talk."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from conftest import TESTS


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((TESTS.parent / "scripts/rayjob.yaml").read_text())


def _pods(manifest: Any) -> Iterator[Any]:
    cluster = manifest["spec"]["rayClusterSpec"]
    yield cluster["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in cluster["workerGroupSpecs"])


def test_pods_mount_the_sweep_folder_without_a_token(manifest: Any) -> None:
    words = shlex.split(manifest["spec"]["entrypoint"])
    folder = next(word.partition("=")[2].rstrip(";") for word in words if word.startswith("folder="))
    for pod in _pods(manifest):
        mounted = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
        (name,) = [name for path, name in mounted.items() if folder.startswith(f"{path}/")]
        assert name in {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    assert {"executor=ray", "executor.address=auto", "hydra.sweep.dir=$folder"} <= {*words}
    assert manifest["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"
