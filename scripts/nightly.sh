#!/usr/bin/env bash
# One night: a sweep into <folder>/<date>, then what changed since the newest finished one before it; its costs are
# held against those of the last seven, which show how far nights drift apart.
#
#   scripts/nightly.sh [overrides of dcpbench...]      # experiment=nightly, unless another is named
#
# Run twice on one day it goes on with what is there. Exit status: 0 when every cell came out as it should and
# nothing is worse than before; 1 when something is not; 2 when nothing could be started or compared; 130 when
# it was broken off.
#
#   NIGHTLY_DIR   where the nights lie       (outputs/nightly in the checkout)
#   NIGHTLY_DATE  the name of this night     (the date, UTC)
#   PYTHON        what has dcpbench          (.venv/bin/python in the checkout, else python3)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
nights=${NIGHTLY_DIR:-outputs/nightly}
tonight=${NIGHTLY_DATE:-$(date -u +%F)}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
folder=$nights/$tonight

say() { printf 'nightly: %s\n' "$*" >&2; }

# Whether every cell that a sweep was asked for has a row.
finished() {
    "$python" - "$1" <<'PYTHON'
import json
import sys
from pathlib import Path

sweep = Path(sys.argv[1])
try:
    asked = set(json.loads((sweep / "sweep.json").read_text())["cells"])
    done = {json.loads(line)["cell"] for line in (sweep / "results.jsonl").read_text().splitlines()}
except (OSError, ValueError, KeyError, TypeError):
    sys.exit(1)
sys.exit(not asked <= done)
PYTHON
}

# The last seven finished nights before this one, the newest first; their names sort by date.
before() {
    local all=("$nights"/[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*/) name place left=7
    for ((place = ${#all[@]} - 1; place >= 0 && left > 0; place--)); do
        name=$(basename "${all[place]}")
        if [[ $name < $tonight ]] && finished "$nights/$name"; then
            printf '%s\n' "$name"
            left=$((left - 1))
        fi
    done
}

words=("$@" "hydra.sweep.dir=\"$folder\"")
[[ " $*" == *" experiment="* ]] || words=(experiment=nightly "${words[@]}")
[[ -e $folder/sweep.json ]] && words+=("resume=\"$folder\"")

"$python" -m dcpbench "${words[@]}"
swept=$?
if ((swept > 1)); then
    say "$folder: the sweep ended with $swept; nothing is compared"
    exit "$swept"
fi
if ! finished "$folder"; then
    say "$folder: cells are missing; run it again to go on"
    exit 1
fi

mapfile -t nights_before < <(before)
if ((${#nights_before[@]} == 0)); then
    say "$folder: the sweep ended with $swept; no finished night before it to compare with"
    exit "$swept"
fi
last=${nights_before[0]} earlier=("${nights_before[@]:1}")
"$python" -m dcpbench.report compare "$nights/$last" "$folder" "${earlier[@]/#/--earlier=$nights/}" \
    --fail-on regressions,newly-failing | tee "$folder/compare.txt"
compared=${PIPESTATUS[0]}
say "$folder: the sweep ended with $swept, its comparison with $last with $compared"
exit $((compared > swept ? compared : swept))
