"""The words of a command: the secrets, hosts and files that they name."""

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcpbench.plugins.script.copies import Copy

_LEAST_HIDDEN = 8
"""Length of the shortest value that is masked wherever it is; a shorter one can be an ordinary word."""
_NEWEST = re.compile(r"\{newest:([^{}]+)\}")
_NAME = (
    r"(?:[\w.-]*(?:token|key|secret|passw(?:or)?d|passphrase|credentials?)"
    r"|[\w.-]*(?:api|access|secret|private)_?key[\w.-]*)"
)
_SECRET = re.compile(
    rf"""(?i)(?<![\w.-])(-+{_NAME}["']?,?\s+(?!["']?-)|[-+~]*{_NAME}(?:=|["']\s*:\s*))"""
    r"""("[^"]*"|'[^']*'|[^\s"',&}\]]+)"""
)
"""An option and the next word, an assignment, or an entry of JSON: all before the value, and the value."""
_QUOTED = re.compile(rf"(?i)(?<=')([-+~]*{_NAME}=)([^']+)")
"""An assignment in quotes, whose value can have spaces."""
_HOSTS = re.compile(
    r"(?i)\b(?:pet_)?"
    r"(?:(?:nnodes|num[_-](?:machines|nodes)|slurm_(?:job_num_|n)nodes)[= ](?:\d+:)?(?P<count>\d+)\b"
    r"|(?:rdzv[_-]endpoint|master[_-]addr|main[_-]process[_-]ip)[= ](?P<host>\[.*?\]|[^\s:]+)"
    r"|(?:hostfile|config[_-]file)[= ](?P<file>\S+))"
    r"|\bsrun\b.*?\s(?:(?-i:-N) ?|--nodes[= ])(?:\d+-)?(?P<nodes>\d+)\b"
)


def resume_words(words: Sequence[str], copy: Copy, out: Path) -> list[str]:
    """Return the words that a resume adds, with the paths and steps of the newest checkpoints of its copy in
    place of `{newest:PATTERN}` and `{step}`; none of them where nothing fits yet."""
    patterns = dict.fromkeys(pattern for word in words for pattern in _NEWEST.findall(word))
    newest = {pattern: found for pattern in patterns if (found := copy.newest(pattern))}
    if len(newest) < len(patterns):
        return []
    step = next((digits for _, digits in newest.values()), "{step}")
    paths = [_NEWEST.sub(lambda match: str(out / newest[match[1]][0]), word) for word in words]
    return [word.replace("{step}", step) for word in paths]


def secrets_of(words: Sequence[str]) -> frozenset[str]:
    """Return the values of words and variables that are named like a token, key, secret or password."""
    text = shlex.join(words)
    return frozenset(match[2].strip("\"'") for way in (_QUOTED, _SECRET) for match in way.finditer(text))


def hidden(text: str, secrets: frozenset[str]) -> str:
    """Mask secrets in a text, which can quote the command."""
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***") if len(value) >= _LEAST_HIDDEN else text
    return _SECRET.sub(r"\1***", _QUOTED.sub(r"\1***", text))


def other_hosts(words: Sequence[str], variables: Mapping[str, str], cwd: Path) -> str:
    """Return the words, variable, or line of a file that start the command on other hosts too; else empty."""
    is_alone = variables.get("WORLD_SIZE", "1") == "1"  # then an address of the environment is not used
    named = [f"{name}={value}" for name, value in variables.items() if name != "MASTER_ADDR" or not is_alone]
    for text in (" ".join(words), *named):
        for match in _HOSTS.finditer(text):
            count, host, file = match["count"] or match["nodes"], match["host"], match["file"]
            if (count and int(count) > 1) or (host and not _is_here(host)):
                return match[0]
            if file and len(file) < 256 and (cwd / file).is_file():  # of mpirun, DeepSpeed, or accelerate
                text = (cwd / file).read_text(errors="replace")
                lines = [line for line in text.splitlines() if line[:1] > "#"]
                machines = [line for line in lines if re.match(r"num_machines:\s*(?!1\b)\d", line)]
                if machines or (match[0].startswith("hostfile") and len(lines) > 1):
                    return f"{file}: {[*machines, lines[1]][0]}"
    return ""


def _is_here(host: str) -> bool:
    """Tell whether a host, by name or address, is this one: only its own addresses can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host.strip("[]"), 0))
    except OSError:
        return host.lower() in (socket.gethostname().lower(), socket.getfqdn().lower())
    return True


def paths_of(words: Sequence[str], cwd: Path) -> dict[str, str]:
    """Return the words that are the path of a file or folder, or assign it, by the path."""
    path = os.path  # for a word that is too long for a path it is false, where pathlib raises
    values = [(word.rpartition("=")[2], word) for word in words]
    return {
        path.realpath(cwd / value): word
        for value, word in values
        if value and (path.exists(cwd / value) or (os.sep in value and path.isdir((cwd / value).parent)))
    }


def leads_to(path: str, words: Sequence[str], cwd: Path) -> str:
    """Return the word that names a file, or the closest folder that it is below; else empty."""
    named = paths_of(words, cwd)
    above = [place for place in named if f"{path}/".startswith(place.rstrip("/") + "/")]
    return named[max(above, key=len)] if above else ""
