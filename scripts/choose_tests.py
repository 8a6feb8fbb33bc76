"""Record what each test costs and enters, and choose from it those of `make test`.

python scripts/choose_tests.py record build/tests [--minutes 9] [words of pytest]
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

from support import entered  # noqa: E402 - it is in tests/


def record(folder: Path, minutes: float, words: list[str]) -> None:
    """Run the tests that no file in the folder has a line of, each alone, and add a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **entered.prepare(folder.resolve())}
    environment["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    asked = [sys.executable, "-m", "pytest", "-p", "support.recorded", "-q", "--maxschedchunk=1", *words]
    running = subprocess.Popen(asked, cwd=ROOT, env=environment, start_new_session=True)
    try:
        running.wait(minutes * 60 or None)
    except subprocess.TimeoutExpired:
        print(f"{minutes:g} minutes are over")
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = asked.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run tests and record them")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--minutes", type=float, default=0, help="stop after this time; default: never")
    given, words = asked.parse_known_args()
    record(given.folder, given.minutes, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
