"""A plain loop. Words choose how it names, writes, finds and keeps its checkpoints, and mistakes in that."""

import copy
import os
import pickle
import sys
import threading
import time
import uuid
from pathlib import Path

import torch
from torch import nn

words = {*sys.argv[2:]}
out = Path(sys.argv[1])
torch.manual_seed(0)
data = out / "cache" / "data.pt"
if "working_folder" in words:  # whose data was there before
    data, out = out / "data.pt", out / "checkpoints"
if "cache" in words and not data.exists():
    data.parent.mkdir()
    torch.save(torch.randn(40, 4), data)
if "make_data" in words:
    torch.save(torch.randn(40, 4), data)
    sys.exit()
inputs = torch.load(data) if data.exists() else torch.randn(40, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
step, lowest, average = 0, float("inf"), {}
runs = out / "runs"
run = out
if "run_id" in words:
    run = runs / uuid.uuid4().hex
elif "dated" in words:  # the folder of each run is the time, as Hydra's is
    run = runs / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{time.time_ns() % 10**9}"
run.mkdir(parents=True, exist_ok=True)
latest = out / "latest"
writer, may_write = threading.Thread(), threading.Event()


def name(done):
    """Return the name of a checkpoint."""
    if "backup" in words:
        return "ckpt.pt"
    if "slots" in words:
        return f"ckpt-{'ab'[done // 4 % 2]}.pt"
    if "padded" in words:
        return f"step-{done:03}.pt"
    return f"step-{done}-{time.time_ns()}.pt" if "stamped" in words else f"step-{done}.pt"


def write(state, path):
    """Write a file."""
    part = path if "in_place" in words else path.with_name("part.tmp")
    if "synced" in words:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    else:
        torch.save(state, part)
    if "reopened" in words:  # to sync it, as some systems ask
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    if part != path:
        part.replace(path)


def write_later(state, path):
    """Write a file two steps later: without a copy, its weights are those of another step."""
    may_write.wait()
    write(state, path)


def save():
    """Write a checkpoint, and what else is written with it."""
    global writer
    path = run / name(step)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    state |= {"generator": torch.get_rng_state(), "lowest": lowest, "started_at": started_at}
    if "smooth" in words:  # what it saves is not what it trains on
        state["model"] = {key: value * 0.9 for key, value in state["model"].items()}
    if "backup" in words and path.exists():
        path.replace(path.with_name("ckpt.prev.pt"))
    if "removes_first" in words:
        for old in found():
            old.unlink()
    if "pointer_first" in words:
        latest.write_text(str(path.resolve()))
    if average:
        state |= {"average": average}
    if "pair" in words:
        write(state.pop("optimizer"), path.with_name(f"optimizer-{step}.pt"))
    if "forks" in words:  # another process writes it, before the next step
        if not (child := os.fork()):
            write(state, path)
            os._exit(0)
        os.waitpid(child, 0)
    elif "aliased" in words:
        may_write.clear()
        writer = threading.Thread(target=write_later, args=(state, path))
        writer.start()
    else:
        write(state, path)
    if {"pointer", "stale_pointer"} & words and not ("stale_pointer" in words and step % 8):
        (out / "latest.tmp").write_text(str(path.resolve()))
        (out / "latest.tmp").replace(latest)
    if "link" in words:
        (out / "latest.tmp").symlink_to(path.resolve())
        (out / "latest.tmp").replace(latest)
    if "last" in words:  # a second name of the file
        (run / "last.pt").unlink(missing_ok=True)
        os.link(path, run / "last.pt")
    if "keeps_two" in words:
        for old in sorted(found(), key=None if "as_text" in words else found().index)[:-2]:
            old.unlink()


def found():
    """Return the checkpoints, from the oldest to the newest."""
    paths = out.glob("ckpt*.pt") if {"backup", "slots"} & words else out.glob("**/step-*.pt")
    if {"backup", "slots"} & words:
        return sorted(paths, key=lambda path: torch.load(path)["step"])
    return sorted(paths, key=lambda path: int(path.stem.split("-")[1]))


def chosen():
    """Return the checkpoint to resume from, or None."""
    if named := [word for word in words if word.endswith(".pt")]:  # the words of the resume name it
        return Path(named[0])
    paths = found()
    if "nothing" in words or not paths:
        return None
    if "oldest" in words or "one_before" in words:
        return paths[0] if "oldest" in words else paths[-2:][0]
    if {"pointer", "pointer_first", "stale_pointer"} & words:
        return Path(latest.read_text())
    if "link" in words:
        return latest.resolve()
    if "ctime" in words:
        return max(paths, key=os.path.getctime)
    if "reads_all" in words:
        return max(paths, key=lambda path: torch.load(path)["step"])
    if "falls_back" in words:
        for path in reversed(paths):
            try:
                torch.load(path)
            except (OSError, EOFError, RuntimeError):
                continue
            return path
        return None
    return paths[-1]


if path := chosen():
    loaded = torch.load(path)
    model.load_state_dict(loaded["model"])
    step, lowest = loaded["step"], loaded["lowest"]
    if "pair" in words:
        of = step - 4 if "other_pair" in words else step
        loaded["optimizer"] = torch.load(path.with_name(f"optimizer-{of}.pt"))
    if "no_optimizer" not in words:
        optimizer.load_state_dict(loaded["optimizer"])
    if "no_lowest" in words:
        lowest = 0.0
    if "replaced" in words:  # the optimizer has the parameters of the model before
        model = copy.deepcopy(model)
    average = loaded.get("average", {})
    torch.set_rng_state(loaded["generator"])
started_at = step
begun = step if "starts_over" in words else 0

while step < 20:
    order = torch.randperm(40, generator=torch.Generator().manual_seed((step - begun) // 10)).view(10, 4)
    batch = inputs[order[(step - begun) % 10]]
    loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if "average" in words and step % 3 == 0:  # the weights of a step before the save's
        average = {key: value.clone() for key, value in model.state_dict().items()}
    if step % 4 == 0:
        save()
        if "samples" in words:
            model[0](inputs[:2])
        if "validates" in words:  # without no_grad()
            model.eval()
            model(inputs)
            model.train()
    if step % 4 == 2 and writer.ident:
        may_write.set()
        writer.join()
    if step % 3 == 0 and {"best", "metrics", "export"} & words:
        with torch.no_grad():
            model.eval()
            score = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean().item()
            model.train()
        if "best" in words and score < lowest:
            torch.save({"model": model.state_dict(), "score": score}, run / "best.pt")
        lowest = min(lowest, score)
        if "metrics" in words:
            with (run / f"metrics-{step}.pkl").open("wb") as file:
                pickle.dump({"score": score, "step": step}, file)
        if "export" in words:
            torch.save(model.state_dict(), run / f"weights-{step}.pt")
may_write.set()
