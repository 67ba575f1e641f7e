# visard: `make help` lists what can be made.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz flower lint types bench docs clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "visard needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,align]'
	@touch $@

setup: $(READY)  ## make the virtual environment and install visard into it

demo: $(READY)  ## train across ten parties on synthetic faces and write a report (about three minutes)
	$(BIN)/visard run demo --out runs/demo --overwrite

test: $(READY)  ## all tests that need nothing but this clone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m 'not shared and not flower'

fuzz: $(READY)  ## property tests on new random examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --hypothesis-profile=random tests/property

flower: $(READY)  ## install Flower and test simulations and deployments with it, on loopback
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[flower]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m flower

lint: $(READY)  ## style and likely mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## static types, strict
	$(BIN)/mypy

bench: $(READY)  ## speed and memory, each next to a peer or the machine's limit (long)
	for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python -m benchmarks.$$(basename $$b .py) || exit 1; done

docs: $(READY)  ## run every command that the documentation shows
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/e2e/test_docs.py

clean:  ## remove the virtual environment, runs and caches
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
