# The two commands of the README, and what they are made of. Each sets up `.venv` when it is not there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test lint bench soak setup clean

run: $(VENV)/.ready
	$(BIN)/python -m dcpbench -m parallel=ddp,fsdp,hsdp,fsdp_tp,fsdp2 compile=false,true save=sync,async

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready
	$(BIN)/python bench/digest.py
	$(BIN)/python bench/cells.py --fresh
	$(BIN)/python bench/seeds.py
	$(BIN)/python bench/long.py
	$(BIN)/python bench/report.py

soak: $(VENV)/.ready
	$(BIN)/python bench/soak.py

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
