"""Run ckpt-chaos (`pip install ckpt-chaos`) on the scripts of ResumeBench that are one process, or DDP.

python benchmarks/resumebench/chaos.py plain    # those whose command has one of these words

It judges a script, not a stop: it ends the script at file events, and compares the values in the last
checkpoint, since equal values can be other bytes in a file. A verdict is right if it is a failure where
`cases.json` expects one at some stop, and only there. Files cut to half are left out: a script that
stops at one would be a failure, whatever its mistake is.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import HERE, command

RESULTS = {
    "plain.py": "step-16.pt",
    "extras.py": "checkpoint-12.pt",
    "raw.py": "step-16/trainer.pt",
    "mixed.py": "step-12.pt",
    "ddp.py": "step-10.pt",
}
SHOW = (
    "import sys, torch; torch.set_printoptions(17, 10**9); print(torch.load(sys.argv[1], map_location='cpu'))"
)
POINTS = 4


def fails(script, ranks, place):
    """Run ckpt-chaos on a script, and tell whether it reports a failure."""
    # It does not make the folder of the output.
    words = ["bash", "-c", 'mkdir -p "$0" && exec "$@"', "{out}", *command({"script": script})]
    result = f"{{out}}/{RESULTS[script.split()[0]]}"
    shown = shlex.join([sys.executable, "-c", SHOW, result])
    options = ["--result-cmd", shown, "--max-points", str(POINTS), "--ranks", str(ranks), "--modes", "before"]
    options += ["--timeout", "120"]  # a script that hangs is a failure
    ended = subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", "run", *options, "--work", str(place), "--", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode not in (0, 1) or "before any crash" in ended.stdout + ended.stderr:
        raise SystemExit(f"{script}: ckpt-chaos ended with {ended.returncode}\n{ended.stdout[-1000:]}")
    return ended.returncode == 1


def main(words):
    """Run the selected scripts, print a line for each, and the number of those that are right."""
    expected = {}
    for case in json.loads((HERE / "cases.json").read_text()):
        stop = case["stop"].partition("@")[0]
        if case["script"].split()[0] in RESULTS and case["verdict"] != "not_reached" and stop != "torn":
            key = case["script"], case.get("ranks", 1)
            expected[key] = expected.get(key, False) or case["verdict"] != "exact"
    chosen = {key: bad for key, bad in expected.items() if not words or any(word in key[0] for word in words)}
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, ((script, ranks), bad) in enumerate(chosen.items()):
            began = time.monotonic()
            failed = fails(script, ranks, Path(folder, str(number)))
            right += failed == bad
            word, seconds = "right" if failed == bad else "WRONG", time.monotonic() - began
            text = f"{'fails' if failed else 'passes'}, expected {'a failure' if bad else 'none'}"
            print(f"{word} {seconds:5.1f} s  {script}: {text}", flush=True)
    print(f"{right} of {len(chosen)} scripts right")


if __name__ == "__main__":
    main(sys.argv[1:])
