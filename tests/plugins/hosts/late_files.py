"""`convert`, in which ranks wait shortly for files that they do not see; and, in this process, the hosts on
which some files are late (`late_files.c`)."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from dcpbench.cell import checkpoint_files, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun
from plugins.hosts.namespaces import Namespace

WAITS_S = 10.0
_OTHER_GROUP = 65534


def train_and_save(cell: Cell) -> tuple[Cell, ReferenceRun]:
    """The first stage."""
    with mock.patch.object(checkpoint_files, "SHOWS_S", WAITS_S):
        return uninterrupted.save_reference(*uninterrupted.train_unsaved(cell))


def late_hosts(hosts: Sequence[Namespace], rules: Mapping[Path, str], where: Path) -> list[Namespace]:
    """Two hosts that see late what the other one writes into a folder, as its rule says."""
    library = where / "late_files.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    told = "\n".join(f"{folder}/ {rule}" for folder, rule in rules.items())
    late = ("env", f"LD_PRELOAD={library}", f"LATE_FILES={told}")
    other = ("setpriv", f"--regid={_OTHER_GROUP}", "--clear-groups")
    return [replace(hosts[0], also=late), replace(hosts[1], also=(*other, *late))]
