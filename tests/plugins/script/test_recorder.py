"""The recorder in a process of the script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dcpbench.plugins.script.run import RECORDER

Event = dict[str, Any]


def events_of(folder: Path, code: str, *words: str, **variables: str) -> list[Event]:
    """Run code in a recorded process in `folder`, whose `out` is watched, and return its events."""
    for name in ("records", "out"):
        (folder / name).mkdir(exist_ok=True)
    known = {"records": f"{folder}/records", "watched": f"{folder}/out", "every": 1, "stop": ""}
    (folder / "settings.json").write_text(json.dumps(known))
    (folder / "code.py").write_text(code)
    path = os.pathsep.join([str(RECORDER), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "DCPBENCH_SCRIPT": f"{folder}/settings.json"}
    ran = subprocess.run(
        [sys.executable, "code.py", *words],
        cwd=folder, env=os.environ | settings | variables, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "not recorded" not in ran.stderr
    lines = [line for path in (folder / "records").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_spec_that_is_found_and_not_imported(tmp_path: Path) -> None:
    """As by `datasets`, in threads too; torch and torch.save are recorded when they are imported later."""
    events = events_of(
        tmp_path,
        "import importlib.util, threading\n"
        "names = ['torch', 'safetensors', 'safetensors.torch', 'pickle'] * 5\n"
        "look = [threading.Thread(target=importlib.util.find_spec, args=[name]) for name in names]\n"
        "[one.start() for one in look]\n"
        "[one.join() for one in look]\n"
        "spec = importlib.util.find_spec('torch')\n"
        "importlib.util.module_from_spec(spec)\n"
        "import torch, importlib\n"
        "assert type(torch.__spec__.loader).__module__.startswith('_frozen_importlib'), torch.__spec__\n"
        "import safetensors.torch, torch.distributed.checkpoint as dcp, pickle\n"
        "for module in (torch.serialization, safetensors.torch, pickle):\n"
        "    importlib.reload(module)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "torch.save({'w': model.weight}, 'out/a.pt')\n"
        "torch.serialization.save({'w': model.weight}, 'out/b.pt')\n"
        "safetensors.torch.save_file(model.state_dict(), 'out/c.safetensors')\n"
        "pickle.dump(1, open('out/d.pkl', 'wb'))\n"
        "dcp.save({'model': model.state_dict()}, checkpoint_id='out/e')\n",
    )
    kinds = [event["e"] for event in events]
    assert [kinds.count(kind) for kind in ("process", "torch", "optimizer", "step")] == [1, 1, 1, 1]
    assert "broken" not in kinds
    saved = [event["path"] for event in events if event["e"] == "save"]
    assert saved == ["a.pt", "b.pt", "c.safetensors", "d.pkl", "e"]


def test_import_that_fails_first(tmp_path: Path) -> None:
    """The second import is hooked; loaders that several modules share call the hook of none else."""
    (tmp_path / "safetensors.py").write_text(
        "import os\n"
        "if os.environ.pop('FAIL', ''): raise ImportError('not yet')\n"
        "def safe_open(name): return name\n"
    )
    events = events_of(
        tmp_path,
        "import sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "try: import safetensors\n"
        "except ImportError: import safetensors\n"
        "safetensors.safe_open('out/x')\n",
        FAIL="1",
    )
    assert [(event["e"], event.get("path")) for event in events] == [("process", None), ("load", "x")]
