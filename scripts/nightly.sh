#!/usr/bin/env bash
# Run a sweep into <folder>/<date>, and compare it with the newest complete run before it; costs are also compared
# with the six before that, which show how much equal sweeps differ.
#
#   scripts/nightly.sh [overrides of dcpbench...]      # experiment=nightly, unless another is named
#
# Start it from anywhere: --config-dir, your model and the folder of the runs are found from the current folder.
# A second start on the same day resumes the run of that day. Exit status: 0 if every cell ended as expected and
# nothing is worse than before; 1 if not, or if cells are missing; 2 if nothing could be started or compared;
# 130 if it was interrupted.
#
#   NIGHTLY_DIR   folder of the runs              (outputs/nightly in the current folder)
#   NIGHTLY_DATE  name of this run                (the date, UTC)
#   KEEP_NIGHTS   number of runs to keep          (30; older ones are removed after a complete run)
#   PYTHON        Python that has dcpbench        (.venv/bin/python of this script's checkout, else python3)
set -uo pipefail

checkout=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
nights=${NIGHTLY_DIR:-outputs/nightly}
tonight=${NIGHTLY_DATE:-$(date -u +%F)}
python=${PYTHON:-$([ -x "$checkout/.venv/bin/python" ] && echo "$checkout/.venv/bin/python" || echo python3)}
folder=$nights/$tonight
keep=${KEEP_NIGHTS:-30}

say() { printf 'nightly: %s\n' "$*" >&2; }

if [[ ! $keep =~ ^[1-9][0-9]{0,5}$ ]]; then
    say "KEEP_NIGHTS=$keep: not a number of nights; give 1 or more"
    exit 2
fi

# Succeed if every cell of a sweep has a row. -I: import nothing from the current folder.
finished() {
    "$python" -I - "$1" <<'PYTHON'
import json
import sys
from pathlib import Path

sweep = Path(sys.argv[1])
try:
    asked = len(json.loads((sweep / "sweep.json").read_text())["cells"])
    rows = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    done = len({(row["config_digest"], row["repeat"]) for row in rows})
except (OSError, ValueError, KeyError, TypeError):
    sys.exit(1)
sys.exit(done < asked)
PYTHON
}

# Print the last seven complete runs before this one, the newest first; their names sort by date.
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

# Remove all but the newest $keep runs. A run is a folder of this user directly in $nights, named by a date, with a
# sweep in it. No link is followed. Today's run stays, and so does one whose lock a driver holds.
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
[[ -e $folder/sweep.json ]] && words=(resume "$folder" "$@") # words about cells have to be those of the sweep

"$python" -m dcpbench "${words[@]}"
swept=$?
if ((swept > 1)); then
    say "$folder: the sweep ended with $swept; nothing is compared"
    exit "$swept"
fi
if ! finished "$folder"; then
    say "$folder: cells are missing; run it again to resume"
    exit 1
fi

mapfile -t nights_before < <(before)
if ((${#nights_before[@]} == 0)); then
    say "$folder: the sweep ended with $swept; no finished night before it to compare with"
    keep_newest
    exit "$swept"
fi
last=${nights_before[0]} earlier=("${nights_before[@]:1}")
"$python" -m dcpbench compare "$nights/$last" "$folder" "${earlier[@]/#/--earlier=$nights/}" \
    --fail-on regressions,newly-failing | tee "$folder/compare.txt"
compared=${PIPESTATUS[0]}
say "$folder: the sweep ended with $swept, its comparison with $last with $compared"
keep_newest
exit $((compared > swept ? compared : swept))
