# The first target that needs .venv creates it. `install` and `demo` install the packages of all kway
# commands; all other targets also install the packages for development. CONSTRAINTS= installs the
# newest versions instead of the pinned ones.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV   ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV is "$(VENV)": choose a path without spaces)
endif
BIN    := $(VENV)/bin
KWAY   := $(VENV)/.installed
READY  := $(VENV)/.installed-dev
# NO_MKDOCS_2_WARNING hides a notice that the theme reaches end of life in May 2027.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

# Without bytecode files, each of the thousand processes of the tests would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-dev demo test test-slow baseline planted-faults check format bench-data bench-heads bench-serving bench-trainer bench-plan bench-classes container-check docs figures screenshots soak clean
.DEFAULT_GOAL := help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# pip prints three lines for each of 300 packages. Show only large downloads and the last step, which
# takes long. With --no-compile, Python compiles modules when they are first imported, instead of pip
# compiling all 27,000 of them in one process, which takes a minute.
install = set -o pipefail; $(BIN)/pip install --no-compile --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(1)]' \
	| sed -unE -e '/^ *(Downloading|Using cached) .* MB\)/p' -e 's/^(Installing) .*/  \1 the packages …/p'
$(KWAY) $(READY): SHELL := /bin/bash

# setup.py and the C file: the C extension is built again if they change.
$(KWAY): pyproject.toml $(CONSTRAINTS) setup.py data/images/_jpeg.c
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"error: kway needs Python >= 3.11, but $(PYTHON) is {v.major}.{v.minor}: pass another interpreter with PYTHON=") if v < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing kway and the packages of its commands into $(VENV): 2 GB, or 6 GB with CUDA. Takes a few minutes.'
	@$(call install,all)
	touch $@

$(READY): $(KWAY)
	@echo 'Installing the packages for development into $(VENV): 2 GB. Takes a few minutes.'
	@$(call install,dev)
	touch $@

install: $(KWAY)  ## create .venv with the packages of all kway commands
install-dev: $(READY)  ## add the packages for development
demo: $(KWAY)    ## draw glyphs, train three heads, export one, serve and query it
	$(BIN)/kway demo

# Run each file in a single worker, so that fixtures shared by its tests, such as a server, are
# created only once.
test: $(READY)   ## run the default test suite in parallel
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile

test-slow: $(READY)  ## run the long tests
	$(BIN)/python -m pytest -m slow

soak: $(READY)   ## disturb runs at random times and print a table of the trials (20 min)
	$(BIN)/python -m tests.soak

planted-faults: $(READY)  ## check that the tests catch the faults of tests/planted (PLANTED=ID|AREA, 15-45 min)
	$(BIN)/python -m tests.faults_planted --jobs 2 $(PLANTED)

container-check: $(READY)  ## check the Dockerfile, and install its packages into a new environment (10 min)
	$(BIN)/python -m pytest tests/container

check: $(READY)  ## run ruff, mypy, import-linter and tests/size.py, and build the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.size
	$(MKDOCS) build --strict  # --quiet would hide warnings from --strict

baseline: $(READY)  ## compare losses, samples, runs, answers and exit codes with tests/baseline
	$(BIN)/python -m tests.baseline

docs: $(READY)   ## build the documentation site in site/
	$(MKDOCS) build --strict

format: $(READY) ## format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-heads: $(READY)  ## measure speed and memory of the heads, as ratios (20 min)
	$(BIN)/python -m benchmarks.heads

bench-data: $(READY)  ## measure speed and memory of data loading, as ratios (3-15 min, 3 GB)
	$(BIN)/python -m benchmarks.data

bench-trainer: $(READY)  ## measure the trainer against a bare training loop (4 min)
	$(BIN)/python -m benchmarks.trainer

bench-plan: $(READY)  ## compare kway plan with steps on this CPU (5 min, 8 GB)
	$(BIN)/python -m benchmarks.plan

bench-classes: $(READY)  ## run 10,000,000 classes from shards to a query, against kway plan (20 min, 6 GB)
	$(BIN)/python -m benchmarks.class_list

bench-serving: $(READY)  ## measure the servers and the cost of a query (30 min, 5 GB)
	$(BIN)/python -m benchmarks.serving

figures: $(READY) ## draw the figures of docs/heads.md and docs/data.md
	$(BIN)/python -B -m docs.figures

screenshots: $(READY)  ## take the docs' screenshots of the demo's web page and report
	$(BIN)/python -B -m docs.screenshots demo

clean:           ## remove .venv and the files of the demo
	rm -rf $(VENV) demo
