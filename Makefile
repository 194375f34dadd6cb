# Every target sets up what it needs: the first one that runs makes .venv from constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: help install demo test test-slow check format bench-data bench-heads bench-serving bench-trainer bench-tree container-check pictures screenshots soak clean
.DEFAULT_GOAL := help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"error: kway needs Python >= 3.11, $(PYTHON) is {v.major}.{v.minor}; name another with PYTHON=") if v < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $@

install: $(READY)  ## create .venv with everything, as constrained
demo: $(READY)   ## the main job: glyph pictures -> shards -> training -> bundle -> server -> answers
	$(BIN)/kway demo

# By file, so that what a file shares, such as a server, is made once; not more at once, for the
# tests start ranks and servers of their own.
test: $(READY)   ## the default test suite, several files at once
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: $(READY)  ## the long tests
	$(BIN)/python -m pytest -m slow

soak: $(READY)   ## every fault in full counts, written to docs/soak.md: over half an hour
	$(BIN)/python -m tests.soak --out docs/soak.md

# As root, with debootstrap and iproute2; CONTAINER= takes more options, docs/containers.md.
container-check: $(READY)  ## build the Dockerfile without an engine and use its images: ten minutes
	$(BIN)/python -m tests.container $(CONTAINER)

check: $(READY)  ## lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-heads: $(READY)  ## the speed and memory of the heads, printed as ratios: under 20 minutes
	$(BIN)/python -m benchmarks.heads

bench-data: $(READY)  ## the speed and memory of the data side, printed as ratios: 5 minutes
	$(BIN)/python -m benchmarks.data

bench-trainer: $(READY)  ## what training costs beside the model itself: 3 minutes
	$(BIN)/python -m benchmarks.trainer

bench-serving: $(READY)  ## what serving costs, compared with the model alone and with other servers: 17 minutes, 5 GB of disk
	$(BIN)/python -m benchmarks.serving

bench-tree: $(READY)  ## the cover tree of a million classes
	$(BIN)/python -m benchmarks.cover_tree

pictures: $(READY) ## draw the pictures of docs/heads.md and docs/data.md
	$(BIN)/python -B -m docs.pictures

screenshots: $(READY)  ## photograph the page over the model of `make demo`, in Chromium
	$(BIN)/python -B -m docs.screenshots demo

clean:           ## remove the virtual environment and what the demo made
	rm -rf $(VENV) demo
