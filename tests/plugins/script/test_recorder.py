"""The recorder in a process of the script."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dcpbench.plugins.script.run import RECORDER

Event = dict[str, Any]


def events_of(folder: Path, code: str, status: int = 0, **variables: str) -> list[Event]:
    """Run code in a recorded process in `folder`, whose `out` is watched, and return its events. Files that
    are there before are protected."""
    for name in ("records", "out"):
        (folder / name).mkdir(exist_ok=True)
    known = {"records": f"{folder}/records", "watched": f"{folder}/out", "every": 1, "stops": []}
    known |= {"began": time.time(), "own": [f"{folder}/records", f"{folder}/out"], "named": [str(folder)]}
    (folder / "settings.json").write_text(json.dumps(known))
    (folder / "code.py").write_text(code)
    path = os.pathsep.join([str(RECORDER), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "DCPBENCH_SCRIPT": f"{folder}/settings.json"}
    ran = subprocess.run(
        [sys.executable, "code.py"],
        cwd=folder, env=os.environ | settings | variables, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == status, ran.stderr
    assert "not recorded" not in ran.stderr
    lines = [line for path in (folder / "records").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
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
        "torch.autograd.grad(outputs=model(torch.ones(1, 2)).sum(), inputs=[*model.parameters()])\n"
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


@pytest.mark.slow
def test_a_model_that_the_script_drops_is_freed(tmp_path: Path) -> None:
    """At once, without the garbage collector; its input is recorded, of a model inside `vmap` too. It has no
    hash while it is built."""
    events = events_of(
        tmp_path,
        "import gc, torch, weakref\n"
        "gc.disable()\n"
        "class Named(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 1); self.name = 'net'\n"
        "    def __hash__(self): return hash(self.name)\n"
        "model = Named()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "torch.vmap(model)(torch.ones(3, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "model, dropped = None, weakref.ref(model)\n"
        "assert dropped() is None\n",
    )
    assert [event["e"] for event in events if event["e"] in ("step", "broken")] == ["step"]
    (step,) = [event for event in events if event["e"] == "step"]
    assert [len(step["parts"][kind]) for kind in ("batch", "rows", "weights")] == [1, 3, 2]


@pytest.mark.slow
def test_gradients_of_each_sample_are_of_one_step(tmp_path: Path) -> None:
    """By transforms of `torch.func`, inside which the module has other parameters."""
    events = events_of(
        tmp_path,
        "import torch\n"
        "from torch.func import functional_call, grad, vmap\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "def loss_of(params, x): return functional_call(model, params, (x[None],)).sum()\n"
        "of_each = vmap(grad(loss_of), (None, 0))(dict(model.named_parameters()), torch.ones(5, 2))\n"
        "for name, parameter in model.named_parameters(): parameter.grad = of_each[name].mean(0)\n"
        "optimizer.step()\n",
    )
    assert [event["e"] for event in events if event["e"] in ("step", "broken")] == ["step"]
    (step,) = [event for event in events if event["e"] == "step"]
    assert [len(step["parts"][kind]) for kind in ("batch", "weights", "gradients")] == [1, 4, 4]


@pytest.mark.slow
def test_step_of_an_inner_optimizer_belongs_to_the_outer_one(tmp_path: Path) -> None:
    """As of SAM, or of an optimizer that shards the state of another one."""
    events = events_of(
        tmp_path,
        "import torch\n"
        "class Outer(torch.optim.Optimizer):\n"
        "    def __init__(self, p):\n"
        "        super().__init__(p, {}); self.inner = torch.optim.SGD(self.param_groups, 0.1)\n"
        "    def step(self): self.inner.step()\n"
        "model = torch.nn.Linear(2, 1); optimizer = Outer([*model.parameters()])\n"
        "for _ in range(2): model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n",
    )
    steps = [(event["optimizer"], event["k"]) for event in events if event["e"] == "step"]
    assert steps == [(0, 0), (1, 1), (0, 1), (1, 2)]


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


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder with files of the user, to which a link in `out` leads."""
    users = tmp_path / "users"
    (users / "below").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for path in ("last.pt", "log.txt", "below/data.bin"):
        (users / path).write_text("mine")
    (tmp_path / "out" / "link").symlink_to("../users")
    time.sleep(0.02)  # longer than a tick of the file system's clock
    return users


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("open('users/last.pt', 'wb')", "last.pt"),
        ("open('users/log.txt', 'a')", "log.txt"),
        ("os.open('users/last.pt', os.O_RDWR)", "last.pt"),
        ("open('out/link/last.pt', 'w')", "last.pt"),
        ("os.truncate('users/last.pt', 0)", "last.pt"),
        ("open('new', 'w').close(); os.replace('new', 'users/last.pt')", "last.pt"),
        ("pathlib.Path('users/last.pt').rename('users/old.pt')", "last.pt"),
        ("os.rename('users/below', 'users/before')", "below/data.bin"),
        ("pathlib.Path('users/last.pt').unlink()", "last.pt"),
        ("os.unlink('last.pt', dir_fd=os.open('users', os.O_RDONLY))", "last.pt"),
        ("shutil.rmtree('users/below')", "below/data.bin"),
        ("import torch; torch.save(1, 'users/last.pt')", "last.pt"),
        ("os.fork() or open('users/last.pt', 'wb'); os.wait(); os.kill(os.getpid(), 9)", "last.pt"),
    ],
)
def test_file_of_the_user_is_not_changed(tmp_path: Path, users: Path, code: str, path: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from .serialization import save")
    (tmp_path / "torch" / "serialization.py").write_text(  # a write that raises no audit event of files
        "import subprocess\ndef save(obj, f): subprocess.run(['sh', '-c', f'echo > {f}'])\n"
        "def load(f): pass\n"
    )
    events = events_of(tmp_path, f"import os, pathlib, shutil\n{code}", status=-signal.SIGKILL)
    assert [event["path"] for event in events if event["e"] == "harm"] == [str(users / path)]
    assert (tmp_path / "records" / "harm").exists()
    assert (users / path).read_text() == "mine"


def test_what_is_not_protected(tmp_path: Path, users: Path) -> None:
    """Reads, files that the run makes, its output, caches, temporary folders, and locks."""
    places = ("hf/hub", ".cache/x", "__pycache__", "model_cache", "tmp", "wandb")
    for place in places:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text("cached")
    (users / "data.lock").touch()
    (tmp_path / "out" / "old.pt").write_text("of a resume")
    events = events_of(
        tmp_path,
        "import os, shutil\n"
        "assert open('users/last.pt').read() + open('users/log.txt', 'rb').read().decode() == 'minemine'\n"
        "for path in ('users/new.pt', 'users/data.lock', 'out/old.pt', '/dev/null'):\n"
        "    open(path, 'w').write('x')\n"
        "    open(path, 'a').write('x')\n"
        "os.replace('out/old.pt', 'users/new.pt')\n"
        "os.rename('users/new.pt', 'users/newer.pt')\n"
        "os.unlink('users/newer.pt')\n"
        "os.makedirs('users/made/below')\n"
        "open('users/made/below/x', 'w').write('x')\n"
        "shutil.rmtree('users/made')\n"
        f"for place in {places}:\n"
        "    open(f'{place}/file', 'w').write('x')\n"
        "    shutil.rmtree(place)\n",
        HF_HOME=str(tmp_path / "hf"),
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert [event for event in events if event["e"] in ("harm", "broken")] == []


def test_syncs(tmp_path: Path) -> None:
    events = events_of(
        tmp_path,
        "import os\n"
        "file = open('out/x.tmp', 'w')\n"
        "os.fsync(file)\n"
        "os.fdatasync(file.fileno())\n"
        "other = open('elsewhere', 'w'); os.fsync(other.fileno())\n"
        "os.rename('out/x.tmp', 'out/x')\n"
        "os.fsync(file.fileno())\n"
        "os.sync()\n",
    )
    paths = [event["path"] for event in events if event["e"] == "sync"]
    assert paths == ["x.tmp", "x.tmp", "x", ""]


def test_upload_whose_thread_saves_at_once_is_one_save(tmp_path: Path) -> None:
    """`async_save` can call `save` in a thread before it returns."""
    events = events_of(
        tmp_path,
        "import os, threading, torch\n"
        "from concurrent.futures import Future\n"
        "from dcpbench_recorder import files\n"
        "from dcpbench_recorder.log import Log\n"
        "log = Log(os.environ['DCPBENCH_SCRIPT'])\n"
        "save = files._recorded(lambda state, path: None, 'save', log)\n"
        "def upload(state, path):\n"
        "    thread = threading.Thread(target=save, args=(state, path))\n"
        "    thread.start(); thread.join()\n"
        "    future = Future(); future.set_result(None)\n"
        "    return future\n"
        "files._recorded(upload, 'upload', log)({'a': torch.zeros(1)}, 'out/x')\n",
    )
    assert [event["e"] for event in events if event["e"] in ("save", "saved")] == ["save", "saved"]
