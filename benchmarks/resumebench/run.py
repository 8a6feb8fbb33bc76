"""Run dcpbench on each script of ResumeBench, and compare its verdicts with those of `cases.json`.

python benchmarks/resumebench/run.py              # all cases
python benchmarks/resumebench/run.py extras ddp   # those whose script and stop have one of these words
python benchmarks/resumebench/run.py --checkouts FOLDER   # public scripts: those of `public.json` in FOLDER

A case has the verdict and, where that is not enough, the first difference (`step`, `kind`, `name`, `rank`),
the step that is `loaded`, words of the `likely` cause or of the `reason`, and words that are `never` in them.
Cases of a framework that is not installed are left out: pip install 'dcpbench[frameworks]'.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLUMNS = ("verdict", "step", "kind", "name", "rank", "loaded")
NEEDS = {
    "accelerated.py": "accelerate",
    "hf_trainer.py": "transformers",
    "lightning_fit.py": "lightning",
    "lora.py": "peft",
    "stateful_loader.py": "torchdata",
}
"""The package that a script needs in addition to torch."""


def home(case):
    """Return the folder of a case's script."""
    return Path(case["checkouts"], case["cwd"]) if "checkouts" in case else HERE


def command(case):
    """Return the words that start a case's script: a file, or `-m` and a module of this folder."""
    script, *words = case["script"].split()
    start = [script, words.pop(0)] if script == "-m" else [str(home(case) / script)]
    words = [*start, *(words if "." in words or "{out}" in case["script"] else ["{out}", *words])]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.get('ranks', 1)}"]
    return [sys.executable, *(launcher if "ranks" in case else []), *words]


def missing(case):
    """Return the package that a case needs and that is not installed; None if it can run."""
    package = case.get("needs", NEEDS.get(case["script"].split()[0]))
    return package if package and importlib.util.find_spec(package) is None else None


def working_folder(case, place):
    """Return the folder in which a case's command is typed. `place` is an empty one, for cases that have data
    in it: `prepare` is the word that makes the data."""
    if "prepare" in case:
        subprocess.run([*command(case), case["prepare"]], cwd=place, check=True)
        return place
    return home(case)


def run(case, place):
    """Return the row of a case, and the exit status."""
    options = ["--json", "--dir", str(place / "results"), "--stop", case["stop"], "--grace", "10"]
    options += [f"--every={case.get('every', 1)}", "--resume-args", case.get("resume_args", "")]
    words = [sys.executable, "-m", "dcpbench", "script", *options, "--", *command(case)]
    (place / "work").mkdir(parents=True)
    cwd = working_folder(case, place / "work")
    ended = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if not ended.stdout:
        return {"verdict": None, "reason": ended.stderr.strip()[-300:]}, ended.returncode
    return json.loads(ended.stdout)[0], ended.returncode


def wrong(case, row, status):
    """Return what differs from the expected verdict."""
    details = row.get("details", {})
    seen = {"verdict": row["verdict"], "step": row.get("first_step"), "kind": row.get("first_kind")}
    seen |= {"name": row.get("first_mismatch"), "rank": details.get("rank")}
    seen["loaded"] = row.get("loaded_step")
    likely = " ".join(details.get("likely", ()))
    found = [f"{name} {seen[name]!r}" for name in COLUMNS if name in case and case[name] != seen[name]]
    if case.get("likely", "") not in likely:
        found.append(f"likely {likely!r}")
    text = f"{row['reason']} {likely}"
    if case.get("reason", "") not in text or case.get("never", "-" * 9) in text:
        found.append(f"reason {text!r}")
    expected = {"exact": 0, "restored": 0, "not_reached": 2, "not_deterministic": 2, "vacuous": 2}
    expected = expected.get(case["verdict"], 1)
    return found + ([f"exit status {status}"] if status != expected else [])


def main(words):
    """Run the selected cases, print a line for each, and return the exit status: 1 if one is wrong."""
    cases = json.loads((HERE / "cases.json").read_text())
    if words[:1] == ["--checkouts"]:
        import public_data

        folder, words = Path(words[1]).resolve(), words[2:]
        cases = [case | {"checkouts": str(folder)} for case in json.loads((HERE / "public.json").read_text())]
        absent = [case for case in cases if not home(case).exists()]
        print(*(f"no checkout of {case['repository']} in {home(case)}" for case in absent), sep="\n")
        cases = [case for case in cases if case not in absent]
        public_data.write(folder)
    cases = [
        case
        for case in cases
        if not words or any(word in f"{case['script']} {case['stop']}" for word in words)
    ]
    if not cases:
        print(f"{' '.join(words)}: no script and stop has one of these words", file=sys.stderr)
        return 2
    bad = 0
    absent = {package for package in map(missing, cases) if package}
    skipped = [case for case in cases if missing(case)]
    cases = [case for case in cases if case not in skipped]
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            began = time.monotonic()
            row, status = run(case, Path(folder, str(number)))
            found = wrong(case, row, status)
            bad += bool(found)
            text = (
                f"{case.get('repository', case['script'])} {case['stop']}: {row['reason'] or row['verdict']}"
            )
            print(f"{'WRONG' if found else 'right'} {time.monotonic() - began:5.1f} s  {text}", flush=True)
            for one in row.get("details", {}).get("likely", ()):
                print(f"               likely: {one}", flush=True)
            for one in found:
                print(f"               got {one}, expected {case}", flush=True)
    without = f", {len(skipped)} left out without {', '.join(sorted(absent))}" if skipped else ""
    print(f"{len(cases) - bad} of {len(cases)} right{without}")
    return int(bad > 0 or not cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
