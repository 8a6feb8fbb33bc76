"""A plug-in that notes which files of dcpbench each process enters, in the order of their first calls."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import dcpbench
from dcpbench.core.plugins import API, Plugin

plugin = Plugin(name="entered_files", api=API)

_FOLDER = Path(dcpbench.__file__).parents[1]
_noted: set[str] = set()


def _note(frame: FrameType, event: str, _: Any) -> None:
    name = frame.f_code.co_filename
    if event != "call" or name in _noted or not name.startswith(f"{_FOLDER}{os.sep}") or _imports(frame):
        return
    _noted.add(name)
    process = "rank" if "torch" in sys.modules else "driver"  # which never imports it
    with Path(os.environ["ENTERED_FILES"], process).open("a", encoding="utf-8") as lines:
        lines.write(f"{Path(name).relative_to(_FOLDER).as_posix().removeprefix('dcpbench/')}\n")


def _imports(frame: FrameType) -> bool:
    """Whether a module of dcpbench is being imported: its decorators and class bodies are calls too."""
    caller: FrameType | None = frame
    while caller and not (caller.f_code.co_name == "<module>" and "dcpbench" in caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and not caller.f_code.co_filename.endswith("__main__.py")


threading.setprofile(_note)
sys.setprofile(_note)
