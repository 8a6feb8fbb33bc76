# Every target installs dcpbench and its tools into `.venv` first, if that does not exist.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Let Python keep the bytecode of modules and of tests that pytest has rewritten: later processes start faster.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run check test tests-of-check tests-of-test test-all test-touched test-exhaustive test-frameworks test-scripts test-multinode test-slurm without lint docs samples findings bench mutants fuzz soak setup clean

# 20 cells in 84 s: five parallelisms, compiled or not, sync and async saves.
run: $(VENV)/.ready
	$(BIN)/python -m dcpbench -m parallel=ddp,fsdp,hsdp,fsdp_tp,fsdp2 compile=false,true save=sync,async

# Three workers fill two cores: while the ranks of one wait for each other, the others have something to do.
# A file's tests share sweeps, so they stay together; the longest files begin first.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Three tiers. `check`: the tests without ranks that take no second. `test`: one real cell of each scenario,
# parallelism, death, kind of fault and format too; tests/tiers.txt says why it has which. `test-all`: everything,
# hours.
ELSEWHERE := not multinode and not slurm and not exhaustive

check test: $(VENV)/.ready
	$(MAKE) --jobs=2 lint tests-of-$@

tests-of-check:
	$(PYTEST) -n 2 -m "not slow and not cell and not browser and not extended and $(ELSEWHERE)"

tests-of-test:
	$(PYTEST) -m "not extended and $(ELSEWHERE)"

test-all: lint
	$(PYTEST) -m "$(ELSEWHERE)"
	$(MAKE) test-exhaustive
	$(MAKE) test-frameworks
	$(MAKE) test-multinode
	$(MAKE) test-slurm
	$(MAKE) without

# The extended tests that enter a function of src/ which has changed since tests/entered.txt was written, the
# cheapest first. If they pass, KEEP=--keep writes there that this change is tested.
test-touched: $(VENV)/.ready
	$(BIN)/python scripts/choose_tests.py touched $(KEEP)

# Every cell of the models that the other tests only sample: most of an hour.
test-exhaustive: $(VENV)/.ready
	$(BIN)/python -m pytest --timeout=7200 -m exhaustive

# Verdicts on scripts of frameworks. Installs transformers, Lightning and others.
test-frameworks: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	$(BIN)/python -m pytest tests/plugins/script/test_resumebench.py -k "hf_trainer or lightning or accelerated or lora"

# Verdicts on public scripts, whose checkouts are in FOLDER under the names of their repositories.
test-scripts: $(VENV)/.ready
	$(BIN)/python benchmarks/resumebench/run.py --checkouts $(FOLDER)

# Cells on several hosts: those that Ray simulates, and, as root, network namespaces. Installs Ray.
test-multinode: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m multinode

# The batch script, on a Slurm that is brought up on this machine; as root, for its daemons and to install them.
test-slurm: $(VENV)/.ready
	@command -v slurmctld > /dev/null && command -v munged > /dev/null || { test "$$(id -u)" = 0 || \
	    { echo "test-slurm: slurm-wlm and munge are not installed, and only root can install them" >&2; exit 1; }; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m slurm

# Run `make check` in a copy without a plug-in: PLUGIN=audit, or each in turn. See scripts/without.sh.
without: $(VENV)/.ready
	scripts/without.sh $(VENV) $(PLUGIN)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/links.py
	$(BIN)/python scripts/words.py

# Build the site; a broken link is an error. The search needs http.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html. With search: python3 -m http.server -d build/site, http://localhost:8000"

# Run the script of each finding with this torch: 0 if all are still there, 1 if one is gone, 2 if one could not run.
findings: $(VENV)/.ready
	$(BIN)/python scripts/findings.py

# Write the samples of output, docs/reference.md and the index of findings again. Tests compare them.
samples: $(VENV)/.ready
	$(BIN)/python scripts/samples.py
	$(BIN)/python scripts/site_pages.py
	$(BIN)/python scripts/findings_index.py

# `make bench AGAINST=<commit>` also measures an older commit.
bench: $(VENV)/.ready
	$(if $(AGAINST),$(BIN)/python bench/against.py $(AGAINST))
	$(BIN)/python bench/digest.py
	$(BIN)/python bench/cells.py --fresh
	$(BIN)/python bench/seeds.py
	$(BIN)/python bench/long.py
	$(BIN)/python bench/report.py
	$(BIN)/python bench/script.py

mutants: $(VENV)/.ready
	$(BIN)/python bench/mutants.py --planted
	$(BIN)/python bench/mutants.py --sample 100

# Random sequences of saves and loads on ranks, and random plans of hundreds of ranks: about ten minutes.
fuzz: $(VENV)/.ready
	$(BIN)/python bench/fuzz.py $(or $(EXAMPLES),400)
	$(BIN)/python bench/fuzz_plans.py $(or $(EXAMPLES),400)

soak: $(VENV)/.ready
	$(BIN)/python bench/soak.py
	$(BIN)/python bench/leaks.py
	$(BIN)/python bench/signals.py

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Installing torch, dcpbench and its tools into $(VENV). The first time takes one to five minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV)
