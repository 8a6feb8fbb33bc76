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
#   KEEP_NIGHTS   how many nights stay       (30; older ones are removed after a finished night)
#   PYTHON        what has dcpbench          (.venv/bin/python in the checkout, else python3)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
nights=${NIGHTLY_DIR:-outputs/nightly}
tonight=${NIGHTLY_DATE:-$(date -u +%F)}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
folder=$nights/$tonight
keep=${KEEP_NIGHTS:-30}

say() { printf 'nightly: %s\n' "$*" >&2; }

if [[ ! $keep =~ ^[1-9][0-9]{0,5}$ ]]; then
    say "KEEP_NIGHTS=$keep: not a number of nights; give 1 or more"
    exit 2
fi

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

# Remove the oldest nights, all but the newest $keep: folders of this user's directly in $nights, named by a date,
# with a sweep in them. Follows no link, and leaves tonight's, and one whose lock a driver holds.
keep_newest() {
    local own=() place
    for place in "$nights"/[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]; do
        if [[ -d $place && ! -L $place && -O $place && -f $place/sweep.json && ! -L $place/sweep.json ]] &&
            [[ -f $place/.lock && ! -L $place/.lock ]]; then
            own+=("$place")
        fi
    done
    ((${#own[@]} > keep)) || return 0
    for place in "${own[@]:0:${#own[@]}-keep}"; do
        [[ $place == "$folder" ]] && continue
        if flock --nonblock "$place/.lock" rm -rf --one-file-system -- "$place"; then
            say "$place: removed; the newest $keep nights stay (KEEP_NIGHTS)"
        else
            say "$place: not removed: a driver is running in it, or not all of it can be removed"
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
    keep_newest
    exit "$swept"
fi
last=${nights_before[0]} earlier=("${nights_before[@]:1}")
"$python" -m dcpbench.report compare "$nights/$last" "$folder" "${earlier[@]/#/--earlier=$nights/}" \
    --fail-on regressions,newly-failing | tee "$folder/compare.txt"
compared=${PIPESTATUS[0]}
say "$folder: the sweep ended with $swept, its comparison with $last with $compared"
keep_newest
exit $((compared > swept ? compared : swept))
