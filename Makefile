# `make book` and `make test` are the two commands; `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help book site reproduce test test-engines lint bench setup lock clean

VENV := .venv
BIN := $(VENV)/bin
ENGINES := _build/engines
# A process with one thread for each core; files in their order, each whole in one process, those that need a browser last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder
# Those in the book; another has no committed outputs to compare, and may take hours.
NOTEBOOKS := $(shell sed -n 's|^ *- file: \(notebooks/.*\)|\1.ipynb|p' _toc.yml)
# A neighbouring folder `shared` may hold targets and data that cannot be downloaded; every file is verified before use.
ELSI_ASSETS ?= $(abspath $(wildcard ../shared))
export ELSI_ASSETS
# Threads that wait without spinning: with several processes at work on few cores, spinning costs several times the work.
export OMP_WAIT_POLICY ?= PASSIVE
# Python keeps what it compiles, also where a container says not to: without that each of some sixty processes compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

book: setup  ## fetch, calibrate SmolLM2-135M, run the notebooks, render the site; again: only what changed
	$(BIN)/python workflow/build_book.py book

site: setup  ## render the site from the committed results, computing nothing
	$(BIN)/python workflow/build_book.py site

reproduce: setup  ## make the committed results again: both targets, notebooks in place, data/results
	$(BIN)/python workflow/build_book.py reproduce

test: setup lint  ## ruff, pytest, and nbval: the notebooks' committed outputs against a fresh run
	$(PYTEST)
	$(if $(NOTEBOOKS),ELSI_RESULTS=$(CURDIR)/_build/nbval $(PYTEST) --nbval --nbval-current-env $(NOTEBOOKS))
	@command -v "$${ELSI_CHROMIUM:-chromium}" chromium chromium-browser google-chrome > /dev/null \
	  || echo "The tests of the pages in a browser were skipped: install chromium, or name one in ELSI_CHROMIUM"

test-engines: setup $(ENGINES)/.installed  ## exports read by speculators, in an environment of its own; ELSI_DRAFT=FOLDER tries that draft
	$(BIN)/python -m pytest tests/engines/test_speculators.py

lint: setup  ## ruff
	$(BIN)/ruff check

bench: setup  ## measure the claims about speed, as ratios within one run; ELSI_DRAFT=FOLDER for those that need a trained draft
	$(BIN)/python bench/bench.py
	$(BIN)/python bench/explorer.py
	$(BIN)/python bench/speculative.py $(if $(ELSI_DRAFT),--draft $(ELSI_DRAFT))

setup: $(VENV)/.package  ## .venv with exactly what requirements.lock names; redone only when it changes

lock:  ## renew requirements.lock: newest releases that pyproject.toml allows, tried in an environment of their own
	workflow/find_python -m venv --clear _build/lock
	_build/lock/bin/python -m pip install --quiet setuptools --editable '.[book,test]'
	_build/lock/bin/python workflow/write_lock.py > _build/requirements.lock
	mv _build/requirements.lock requirements.lock

clean:  ## remove what was built; .venv and the download cache stay
	rm -rf _build

# The environment is made anew when the lock changes, so that nothing the lock no longer names is left in it. The lock is closed, so
# nothing is to be resolved but torch's own libraries for this platform, which it leaves out. Python compiles what it imports;
# compiling all 190 packages here would take longer than unpacking them.
$(VENV)/.lock: requirements.lock
	workflow/find_python -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $$(grep '^torch==' requirements.lock)
	touch $@

# torchvision and torchaudio come along and do not import beside this torch; nothing here needs them.
$(ENGINES)/.installed: tests/engines/requirements.txt
	workflow/find_python -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --no-compile --requirement $<
	$(ENGINES)/bin/python -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio
	touch $@

$(VENV)/.package: $(VENV)/.lock pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	touch $@
