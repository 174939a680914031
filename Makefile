.DEFAULT_GOAL := help
PYTHON ?= python

.PHONY: help install check format test test-slow bench demo lowest

help:            ## print the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install:         ## install everything a developer needs into the current environment
	$(PYTHON) -m pip install -e ".[dev]"

check:           ## format, lint, types, import contracts and fast tests: what CI runs
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	lint-imports
	$(PYTHON) -m pytest

format:          ## format and fix what can be fixed
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:            ## fast tests
	$(PYTHON) -m pytest

test-slow:       ## all tests, the slow ones too
	$(PYTHON) -m pytest --slow

bench:           ## ratios of time and memory, each from one run on this machine
	$(PYTHON) -m benchmarks

demo:            ## the whole tool on the embedded suite
	driftlens demo --force

lowest:          ## tests with the lowest supported versions, in an environment of its own
	$(PYTHON) -m pip install uv && uv venv --clear .venv-lowest
	uv pip install --python .venv-lowest --resolution lowest-direct -e ".[test]"
	.venv-lowest/bin/python -m pytest
