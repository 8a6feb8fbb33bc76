"""Run dcpbench on each script of ResumeBench, and compare its verdicts with those of `cases.json`.

python benchmarks/resumebench/run.py              # all cases
python benchmarks/resumebench/run.py extras ddp   # those whose script and stop have one of these words
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLUMNS = ("verdict", "step", "kind")


def command(case):
    """Return the words that start a case's script."""
    script, *words = case["script"].split()
    words = [str(HERE / script), *(words if "{out}" in words else ["{out}", *words])]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.get('ranks', 1)}"]
    return [sys.executable, *(launcher if "ranks" in case else []), *words]


def run(case, place):
    """Return the row of a case, and the exit status."""
    options = ["--json", "--dir", str(place), "--stop", case["stop"], "--grace", "10"]
    options.append(f"--every={case.get('every', 1)}")
    words = [sys.executable, "-m", "dcpbench", "script", *options, "--", *command(case)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if not ended.stdout:
        return {"verdict": None, "reason": ended.stderr.strip()[-300:]}, ended.returncode
    return json.loads(ended.stdout)[0], ended.returncode


def wrong(case, row, status):
    """Return what differs from the expected verdict."""
    seen = {"verdict": row["verdict"], "step": row.get("first_step"), "kind": row.get("first_kind")}
    seen["likely"] = " ".join(row.get("details", {}).get("likely", ()))
    found = [f"{name} {seen[name]!r}" for name in COLUMNS if name in case and case[name] != seen[name]]
    if case.get("likely", "") not in seen["likely"]:
        found.append(f"likely {seen['likely']!r}")
    expected = {"exact": 0, "not_reached": 2, "not_deterministic": 2}.get(case["verdict"], 1)
    return found + ([f"exit status {status}"] if status != expected else [])


def main(words):
    """Run the selected cases, print a line for each, and return how many were wrong."""
    cases = json.loads((HERE / "cases.json").read_text())
    cases = [
        case
        for case in cases
        if not words or any(word in f"{case['script']} {case['stop']}" for word in words)
    ]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            began = time.monotonic()
            row, status = run(case, Path(folder, str(number)))
            found = wrong(case, row, status)
            bad += bool(found)
            text = f"{case['script']} {case['stop']}: {row['reason'] or row['verdict']}"
            print(f"{'WRONG' if found else 'right'} {time.monotonic() - began:5.1f} s  {text}", flush=True)
            for one in row.get("details", {}).get("likely", ()):
                print(f"               likely: {one}", flush=True)
            for one in found:
                print(f"               got {one}, expected {case}", flush=True)
    print(f"{len(cases) - bad} of {len(cases)} right")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
