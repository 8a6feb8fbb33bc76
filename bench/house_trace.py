"""A plug-in that traces in every process of a sweep which files a value passes, for `bench/house.py`."""

import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dcpbench
from dcpbench.core.plugins import API, Plugin

plugin = Plugin(name="house_trace", api=API)

_HOUSE = f"{Path(dcpbench.__file__).parent}{os.sep}"
_PLUGINS = f"{Path(dcpbench.__file__).parents[1] / 'hydra_plugins'}{os.sep}"
_MISMATCHES = ("Finding", "Mismatch", "FailedCheck", "CheckReport")
_SENTENCE = "elements differ, by at most"
_files: dict[CodeType, str] = {}
_written: set[str] = set()
_ended = threading.Event()
"""Set where the value has arrived, or has left for another process for good."""


def _is_word(value: Any) -> bool:
    """Whether it is `parallel=fsdp2` as the user types it, or what that names."""
    if isinstance(value, str):
        return value in ("fsdp2", "parallel=fsdp2")
    return getattr(type(value), "__name__", "") == "ParallelConfig" and vars(value).get("name") == "fsdp2"


def _is_mismatch(value: Any) -> bool:
    """Whether it is a mismatch, or a sentence of one."""
    if isinstance(value, str):
        return _SENTENCE in value
    if isinstance(value, dict):
        return "max_abs_diff" in value and "name" in value
    return type(value).__name__ in _MISMATCHES


_is_value, _BYTES, _END = {
    "parallel=fsdp2": (_is_word, b"fsdp2", "workloads/parallelisms.py"),
    "a mismatch": (_is_mismatch, b"mismatch", ""),
}[os.environ["HOUSE_VALUE"]]


def _contains(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_is_value, value))
    return _is_value(value)


def _file_of(code: CodeType) -> str:
    """The file of a function of the house; empty for any other, and for the body of a module."""
    if code not in _files:
        name = code.co_filename
        inside = name.startswith((_HOUSE, _PLUGINS)) and code.co_name != "<module>"
        _files[code] = os.path.relpath(name, Path(_HOUSE).parent) if inside else ""
    return _files[code]


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield _file_of(frame.f_code)
        frame = frame.f_back


def _note(frame: FrameType | None) -> None:
    files = filter(None, _stack(frame))
    if new := {*(files if _END else islice(files, 1))} - _written:
        _written.update(new)
        with Path(os.environ["HOUSE_TRACED"]).open("a") as traced:
            traced.write("".join(f"{file}\n" for file in sorted(new)))


def _trace(frame: FrameType, event: str, result: Any) -> None:
    if event not in ("call", "return") or _ended.is_set() or not (file := _file_of(frame.f_code)):
        return
    if any(map(_contains, [*frame.f_locals.values()] if event == "call" else [result])):
        _note(frame)
        if _END and file.endswith(_END):
            _ended.set()


class _Pickler(ForkingPickler):
    """What is written for another process is looked at."""

    @classmethod
    def dumps(cls, obj: Any, protocol: int | None = None) -> memoryview:
        written = super().dumps(obj, protocol)
        if _BYTES in bytes(written) and not _ended.is_set():
            _note(sys._getframe())
            if _END and any("/sweep/" in file for file in _stack(sys._getframe())):
                _ended.set()
        return written


def _start() -> None:
    import multiprocessing.connection

    multiprocessing.connection._ForkingPickler = _Pickler  # type: ignore[attr-defined]
    threading.setprofile(_trace)
    sys.setprofile(_trace)


_start()
