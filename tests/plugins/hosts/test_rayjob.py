"""The manifest for Kubernetes, compared with the parts of KubeRay's schema (ray.io/v1) that it uses."""

import shlex
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from conftest import TESTS


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with only these properties, some of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_QUANTITIES = {
    "type": "object",
    "additionalProperties": {"pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i?|m)?$", "type": ["string", "integer"]},
}
_CONTAINER = _object(
    "name",
    name=_TEXT,
    image=_TEXT,
    env=_list(_object("name", name=_TEXT, value=_TEXT)),
    resources=_object(limits=_QUANTITIES, requests=_QUANTITIES),
    volumeMounts=_list(_object("mountPath name", name=_TEXT, mountPath=_TEXT, readOnly=_FLAG)),
)
_VOLUME = _object(
    "name",
    name=_TEXT,
    persistentVolumeClaim=_object("claimName", claimName=_TEXT, readOnly=_FLAG),
    emptyDir=_object(medium=_TEXT, sizeLimit=_TEXT),
)
_POD = _object(spec=_object("containers", containers=_list(_CONTAINER), volumes=_list(_VOLUME)))
_WORKERS = _object(
    "groupName maxReplicas minReplicas template",
    groupName=_TEXT,
    replicas=_NUMBER,
    minReplicas=_NUMBER,
    maxReplicas=_NUMBER,
    rayStartParams=_TEXTS,
    template=_POD,
)
_CLUSTER = _object(
    rayVersion=_TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=_TEXT),
    headGroupSpec=_object("template", rayStartParams=_TEXTS, template=_POD),
    workerGroupSpecs=_list(_WORKERS),
)
_RAY_JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name=_TEXT, namespace=_TEXT),
    spec=_object(
        entrypoint=_TEXT,
        backoffLimit=_NUMBER,
        shutdownAfterJobFinishes=_FLAG,
        ttlSecondsAfterFinished=_NUMBER,
        rayClusterSpec=_CLUSTER,
    ),
)


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((TESTS.parent / "scripts/rayjob.yaml").read_text())


def test_manifest_is_a_ray_job(manifest: Any) -> None:
    jsonschema.validate(manifest, _RAY_JOB)
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] = "2"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, _RAY_JOB)


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
