.DEFAULT_GOAL := help
PYTHON ?= python
SEED ?= 1

.PHONY: help install check format test test-slow fuzz faults every sbom browser families options bench demo suites docs notebooks tutorials gallery screenshots dist lowest

help:            ## print the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install:         ## install everything a developer needs into the current environment
	$(PYTHON) -m pip install -e ".[dev]"

check:           ## format, lint, types, import contracts and fast tests
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

fuzz:            ## 250,000 spoiled inputs of ten kinds; about two hours
	DRIFTLENS_FUZZ=25000 $(PYTHON) -m pytest tests/reads/test_reads.py -n0 -o timeout=0 -v --hypothesis-seed=$(SEED) --hypothesis-show-statistics

faults:          ## 240 commands killed, stopped or starved at random moments; about 20 minutes
	DRIFTLENS_FAULTS=5 $(PYTHON) -m pytest tests/faults -n0 -o timeout=0

every:           ## what CI tries with one of each kind, with every family, calibrator and merge method; an hour
	DRIFTLENS_EVERY=1 $(PYTHON) -m pytest --slow -m every -o timeout=0

sbom:            ## what is installed, as CycloneDX under build/sbom.json; needs the extra `sbom`
	mkdir -p build
	$(PYTHON) -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(PYTHON)

browser:         ## tests in a real browser; a missing one is a failure
	DRIFTLENS_REQUIRE_BROWSER=1 $(PYTHON) -m pytest tests/browser --slow

families:        ## the table of model families in docs, from what the tests show
	$(PYTHON) -m tests.families > docs/families.new && mv docs/families.new docs/families.md

options:         ## the page of command options in docs, from the commands
	$(PYTHON) -m tests.command_options > docs/options.new && mv docs/options.new docs/options.md

bench:           ## measure figures (all, or NAMES="memory text") and write docs/benchmarks.md from them
	DRIFTLENS_RECORD=1 $(PYTHON) -m benchmarks $(NAMES)
	$(PYTHON) -m benchmarks.table

demo:            ## the whole tool on the embedded suite
	driftlens demo --force

suites:          ## train the embedded suites anew and put them into the package; about 20 minutes
	$(PYTHON) -m tools.build_demo

docs:            ## the site, under build/site; its gallery is drawn from a demo run
	test -d build/demo || driftlens demo --suite image --out build/demo
	PLOTLY_RENDERER=notebook NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

notebooks:       ## execute the docs' notebooks and keep what comes out
	$(PYTHON) -m tests.notebooks

tutorials:       ## run the docs' tutorials and keep what they print and draw; needs a browser
	$(PYTHON) -m tests.tutorials

gallery:         ## demo runs, then the pictures of README and docs that are drawn from them
	driftlens demo --suite image --out build/demo --force
	driftlens demo --out build/text --force
	$(PYTHON) -m tests.reports.gallery build/demo build/text

screenshots:     ## pictures of every page of the dashboard, as README and docs show them
	driftlens demo --suite image --out build/demo --force
	driftlens demo --out build/text --force
	$(PYTHON) -m tests.browser.screenshots build/demo docs/dashboard/demo
	$(PYTHON) -m tests.browser.screenshots build/text docs/dashboard/texts overview layers samples repair

dist:            ## sdist and wheel under dist/, of the version that the git tag says
	$(PYTHON) -m pip install build
	rm -rf dist && $(PYTHON) -m build

lowest:          ## tests with the lowest supported versions, in an environment of its own
	$(PYTHON) -m pip install uv && uv venv --clear .venv-lowest
	uv pip install --python .venv-lowest --resolution lowest-direct -e ".[test]"
	.venv-lowest/bin/python -m pytest
