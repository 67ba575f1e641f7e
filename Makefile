# visard: `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# wheels alone, each with a known digest: no setup.py runs, and no build tool is fetched without one; modules are compiled
# when they are first imported, for most of them never are
LOCKED := --quiet --no-compile --require-hashes --no-deps --only-binary :all: --requirement
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

FILES  ?= 5000
SEED   ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup lock sbom demo test shared flower lint types ci pages weights docs site fuzz coverage mutants bench clean
.NOTPARALLEL:

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

# The lock comes first, so that torch finds all that it needs there already and is the only thing without a digest (with
# its CUDA libraries, where the index serves such a build).
$(READY): pyproject.toml constraints.txt requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "visard needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install $(LOCKED) requirements.lock
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(READY)  ## create the virtual environment and install visard into it

lock: $(READY)  ## write the lock files anew, after a change of dependencies in pyproject.toml or constraints.txt
	$(BIN)/python -m tests.lock

sbom: $(READY)  ## write sbom.json: all that is installed from the locks, with licences and digests (CycloneDX)
	$(BIN)/python -m tests.sbom sbom.json

demo: $(READY)  ## adapt a network to new people at four sites, with synthetic faces, and write a report (about a minute)
	$(BIN)/visard run demo --out runs/demo --overwrite

test: $(READY)  ## all tests that need nothing but this clone
	$(PYTEST) -n 2 --dist worksteal -m 'not shared and not flower'

shared: $(READY)  ## tests on real faces, where ../shared/data has them
	$(PYTEST) -n 2 --dist worksteal -m shared || { code=$$?; [ $$code = 5 ] && echo "no tests on real data were found" || exit $$code; }

flower: $(READY)  ## install Flower and test simulations and deployments with it, on loopback
	$(BIN)/python -m pip install $(LOCKED) requirements-flower.lock
	$(PYTEST) -n 3 --dist loadfile -m flower  # they wait for one another: three keep two cores busy

lint: $(READY)  ## style and likely mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## static types, strict
	$(BIN)/mypy

ci: lint  ## everything that must pass before a change lands: .ci/run runs exactly this
	@$(MAKE) types & types=$$!; $(MAKE) test; code=$$?; wait $$types && exit $$code  # types take one core for a minute
	@$(MAKE) shared flower

pages: $(READY)  ## write the generated pages and listings anew, after a change of methods or of what they disclose
	$(BIN)/visard methods --json > listing.json && mv listing.json src/visard/methods/listing.json
	$(BIN)/python -m tests.privacy_page docs/privacy.md
	$(BIN)/python -m pip install $(LOCKED) requirements-flower.lock
	$(BIN)/python -m tests.sbom --page docs/licences.md

weights: $(READY)  ## train the weights that the demo starts from anew; on one kind of processor the same bits (long)
	$(BIN)/visard run tiny-synthetic --out runs/tiny-synthetic --overwrite
	cp runs/tiny-synthetic/model.safetensors src/visard/models/weights/tiny-synthetic.safetensors

docs: $(READY)  ## run every command that the documentation shows
	$(PYTEST) tests/e2e/test_docs.py

site: $(READY)  ## build the documentation as a site that opens offline, in site/index.html, and check its links
	$(BIN)/python -m pip install $(LOCKED) requirements-site.lock
	rm -rf site build/site
	$(BIN)/python -m sphinx -W --keep-going -n -q -c docs -d build/site/pages . build/site/html
	mv build/site/html site
	mv build/site/jupyter_execute/docs/notebooks site/notebooks
	$(BIN)/python -m tests.built_site site

fuzz: $(READY)  ## FILES=5000 mutated files of every format that visard reads, and property tests on new examples
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz --every --files $(FILES) --seed $(SEED) --keep fuzz-failures
	$(PYTEST) -n 2 --hypothesis-profile=random tests/property

coverage: $(READY)  ## which lines the tests run: a table here, the lines in htmlcov/index.html (long)
	$(PYTEST) -n 2 -m 'not shared and not flower' --cov --cov-report=term:skip-covered --cov-report=html

mutants: $(READY)  ## break each numbered equation once and see its golden test fail (long)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations

bench: $(READY)  ## speed and memory, each next to a peer or the machine's limit (long)
	for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python -m benchmarks.$$(basename $$b .py) || exit 1; done

clean:  ## remove the virtual environment, runs and caches
	rm -rf $(VENV) runs site build fuzz-failures htmlcov .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
