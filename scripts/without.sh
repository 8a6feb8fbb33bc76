#!/usr/bin/env bash
# Check that a plug-in can be deleted: in a copy of the tree without its three paths, run `make check` and compose
# every experiment. Without a name, all plug-ins one after the other; `today` is another one each day.
#     scripts/without.sh VENV [PLUGIN|today]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "$1")
mapfile -t all < <(dirname src/dcpbench/plugins/*/plugin.py | xargs basename -a)
case "${2:-}" in
    "") plugins=("${all[@]}") ;;
    today) plugins=("${all[$(date +%-j) % ${#all[@]}]}") ;;
    *) plugins=("$2") ;;
esac
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
unset DCPBENCH_PLUGINS
for plugin in "${plugins[@]}"; do
    echo "without $plugin"
    here=$copy/$plugin
    mkdir "$here"
    git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C "$here"
    rm -r "$here/src/dcpbench/plugins/$plugin" "$here/tests/plugins/$plugin" "$here/docs/plugins/$plugin.md"
    (cd "$here" && PYTHONPATH=$here/src "$venv/bin/python" scripts/site_pages.py) # its values are gone
    test ! -d .mypy_cache || cp -r .mypy_cache "$here" # most of what lint takes
    export PYTHONPATH=$here/src # before the checkout, which is installed
    make -C "$here" --jobs=2 lint tests-of-check VENV="$venv" --old-file="$venv/.ready"
    for experiment in "$here"/conf/experiment/*.yaml "$here"/src/dcpbench/plugins/*/conf/experiment/*.yaml; do
        name=$(basename "$experiment" .yaml)
        # 1: every cell would be skipped
        (cd "$here" && "$venv/bin/python" -m dcpbench plan "experiment=$name" device=cpu) || test $? = 1
    done
    rm -rf "$here"
done
