"""What bash completes, by the script that `dcpbench --completion bash` prints.

Bash breaks words at `=` and replaces the part after the last break: candidates are such parts.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from dcpbench.config.schema import conf_folder
from support.commands import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("bash"), reason="no bash here"),
]

ASKS = """
eval "$(dcpbench --completion bash)"
compopt() { options+=("$2"); }
function=$(complete -p dcpbench | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
while IFS= read -r line; do
    options=() COMP_LINE=$line COMP_POINT=${#line}
    $function dcpbench
    echo "${options[@]}" "${COMPREPLY[@]}"
done
"""
FSDP = sorted(path.stem for path in (conf_folder() / "parallel").glob("fsdp*.yaml"))
COMPLETED = {
    "dcpbench comp": ["compare"],
    "dcpbench re": ["report", "resume"],
    "dcpbench xyzzy": [],
    "dcpbench parallel=fs": FSDP,
    "dcpbench plan -m parallel=fsdp2_p": ["fsdp2_per_layer"],
    "dcpbench run 'parallel=fsdp2_p": ["parallel=fsdp2_per_layer"],  # within quotes there is no break
    "dcpbench run load_parallel=fsdp_n": ["fsdp_no_mesh"],
    "dcpbench run paral": ["nospace", "parallel="],
    "dcpbench run timeouts.sa": ["nospace", "timeouts.save_s="],
    "dcpbench run --config-dir my_conf model=mi": ["mine"],
    "dcpbench report --whe": ["--where"],
    "dcpbench report sweeps/ne": ["default"],
    "dcpbench resume sweeps/ol": ["dirnames"],
}
"""Candidates of a line, and options: bash completes files and folders itself, and adds no space after `=`."""


def test_bash_gets_the_candidates_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "my_conf/model").mkdir(parents=True)
    (tmp_path / "my_conf/model/mine.yaml").touch()
    command = tmp_path / "bin/dcpbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dcpbench "$@"\n')
    command.chmod(0o755)
    path = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    typed = "".join(f"{line}\n" for line in COMPLETED)
    ended = program("bash", "-c", ASKS, input=typed, env=path, cwd=tmp_path, check=True)
    offered = [sorted(line.split()) for line in ended.stdout.splitlines()]
    assert dict(zip(COMPLETED, offered, strict=True)) == COMPLETED, ended.stderr
