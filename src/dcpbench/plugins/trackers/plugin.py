"""Trackers: the command that logs rows to TensorBoard, MLflow or W&B."""

from dcpbench.core.plugins import API, CommandSpec, Plugin

_HERE = "dcpbench.plugins.trackers"

plugin = Plugin(
    name="trackers",
    api=API,
    commands={"log": CommandSpec("write rows to TensorBoard, MLflow or W&B", f"{_HERE}.command:log")},
    trackers={name: f"{_HERE}.{name}" for name in ("tensorboard", "mlflow", "wandb")},
)
