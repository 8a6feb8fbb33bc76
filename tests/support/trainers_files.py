"""Trainers that write files beside their checkpoints, remove checkpoints, or report success too early."""

import copy
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from support.healthy_trainers import Trainer

LATE_S = 0.3


class OneOptimizerFile(Trainer):
    """Overwrites one file with the optimizer beside all checkpoints."""

    def beside(self, path: str) -> Path:
        return Path(path).parent / f"optimizer-{self.rank}.pt"

    def save(self, path: str) -> None:
        state = self.state()
        torch.save(state.pop("optimizer"), self.beside(path))
        torch.save(state, f"{path}-{self.rank}.pt")

    def load(self, path: str) -> None:
        state = torch.load(f"{path}-{self.rank}.pt", weights_only=False)
        self.restore(state | {"optimizer": torch.load(self.beside(path), weights_only=False)})


class PointsToTheLatest(Trainer):
    """Writes folders, and the name of the newest beside them."""

    def save(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        super().save(f"{path}/rank")
        if self.rank == 0:
            (Path(path).parent / "latest").write_text(Path(path).name)

    def load(self, path: str) -> None:
        super().load(f"{path}/rank")


class Logs(Trainer):
    """Appends to a file beside its checkpoints in each step and each save."""

    not_saved = ("log",)
    log: Path | None = None

    def append(self, line: str) -> None:
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{line}\n")

    def step(self) -> torch.Tensor:
        loss = super().step()
        self.append(f"{loss.item()}")
        return loss

    def save(self, path: str) -> None:
        self.log = Path(path).parent / f"log-{self.rank}.txt"
        self.append(f"saved {path}")
        super().save(path)


class KeepsOne(Trainer):
    """Removes older checkpoints after each save."""

    def removes(self) -> bool:
        return True

    def save(self, path: str) -> None:
        super().save(path)
        new = Path(f"{path}-{self.rank}.pt")
        for old in new.parent.glob(f"*-{self.rank}.pt") if self.removes() else ():
            if old != new:
                old.unlink()


class RemovesHalf(KeepsOne):
    def removes(self) -> bool:
        return self.rank == 0


class RemovesTheNewest(KeepsOne):
    """Keeps the checkpoints of steps below 6."""

    def save(self, path: str) -> None:
        Trainer.save(self, path)
        if path.endswith("step-6"):
            Path(f"{path}-{self.rank}.pt").unlink()


class Rank0Late(Trainer):
    """Rank 0 alone writes an index, after the other ranks have returned."""

    def save(self, path: str) -> None:
        super().save(path)
        if self.rank == 0:
            time.sleep(LATE_S)
            Path(f"{path}.index").touch()


class SharedStaging(Trainer):
    """Copies the state into one buffer, which a thread writes later. The next save does not wait for it."""

    not_saved = ("staged",)

    def save(self, path: str) -> Future[None]:
        if not hasattr(self, "staged"):
            self.staged, self.may_write = copy.deepcopy(self.state()), threading.Event()
        self.staged.update(copy.deepcopy(self.state()))
        written = Future[None]()

        def write() -> None:
            self.may_write.wait()
            torch.save(self.staged, f"{path}-{self.rank}.pt")
            written.set_result(None)

        threading.Thread(target=write).start()
        if path.endswith("step-6") or "again" in path:
            self.may_write.set()
        return written


class WritesLate(Trainer):
    """Returns before the file of rank 1 is written."""

    def save(self, path: str) -> None:
        if self.rank == 0:
            super().save(path)
            return
        state = copy.deepcopy(self.state())

        def write() -> None:
            time.sleep(LATE_S)
            torch.save(state, f"{path}-{self.rank}.pt")

        threading.Thread(target=write).start()


class EarlyOnRank1(Trainer):
    """Saves in the background. The future of rank 1 does not wait for the files, that of rank 0 does."""

    def save(self, path: str) -> Future[None]:
        state, success = copy.deepcopy(self.state()), Future[None]()
        files = [Path(f"{path}-{rank}.pt") for rank in (0, 1)]

        def write() -> None:
            time.sleep(LATE_S)
            torch.save(state, temporary := Path(f"{path}.tmp-{self.rank}"))
            temporary.replace(files[self.rank])
            while not all(file.exists() for file in files):
                time.sleep(0.01)
            if self.rank == 0:
                success.set_result(None)

        threading.Thread(target=write).start()
        if self.rank == 1:
            success.set_result(None)
        return success


class WritesNothing(Trainer):
    """Keeps its checkpoints in memory."""

    kept: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - the checkpoints of all

    def save(self, path: str) -> None:
        self.kept[path] = copy.deepcopy(self.state())

    def load(self, path: str) -> None:
        self.restore(copy.deepcopy(self.kept[path]))
