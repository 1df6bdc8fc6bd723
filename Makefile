# Nothing to set first: every target but `gpu` makes .venv if it is missing or out of date. VLLM=0.33: .venv-0.33, with
# that version of vLLM.
VLLM ?=
PYTHON := .venv$(VLLM:%=-%)/bin/python

# The Python that has vLLM for CUDA; nothing is installed there, and nothing of .venv is used.
GPU_PYTHON ?= python3

# Processes that share the tests: one for each core, as long as each has 8 GiB of memory.
JOBS ?= 2

# The environment of the documentation's site.
SITE := .venv/site

# Requests of each kind.
CASES ?= 60

.PHONY: help setup test test-all quick faults accuracy gpu null-gpu lint types format demo release docs site clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 16

setup: ## create or update .venv; VLLM=0.33: .venv-0.33, with another version of vLLM
	@dev/scripts/setup_env.sh $(VLLM)

# A test that hangs ends its process after 400 s (the longest takes 70 s), and the second one that does ends the run.
HANGS := -o faulthandler_timeout=400 --max-worker-restart=1

test: setup ## run the tests of every capability, in JOBS processes (2); DEEP=1 with more examples; ONLY=engine
	PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -m "$(if $(ONLY),$(ONLY) and )not extended" -n $(JOBS) $(HANGS) --durations=20 $(if $(DEEP),--hypothesis-profile=deep)

test-all: setup ## run all tests that need no GPU: also endurance, accuracy and all combinations of kills
	PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(JOBS) --durations=20 $(if $(DEEP),--hypothesis-profile=deep)

quick: setup ## run the tests that start no engine and no other process and take no seconds, in a minute
	PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -m "not engine and not extended and not slow" -n $(JOBS) --durations=20

faults: setup ## make deliberate faults in copies, and check that the tests find them (half an hour)
	$(PYTHON) -m tests.faults

accuracy: setup ## measure the trained tiny model through all topologies, with CASES (60) requests of each kind
	$(PYTHON) -m pytest tests/accuracy -s --cases $(CASES)

gpu: ## run all that needs a GPU and write docs/gpu.md; PART="NAME ..." for some, FRESH=1 from the beginning
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(PART),--parts $(PART)) $(if $(FRESH),--fresh)

null-gpu: setup ## serve released shapes with vLLM's CUDA build on a device that computes nothing; NAMES="h200 ..." for some
	$(PYTHON) -m tests.nullgpu $(NAMES)

lint: setup ## check style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: setup ## check types
	$(PYTHON) -m mypy

format: setup ## fix style and formatting
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

demo: setup ## start a tiny pipeline on this machine, talk to it and stop it
	$(PYTHON) examples/demo.py

release: setup ## build what is published, install it into a new environment and use it there
	dev/scripts/release_check.sh

docs: setup ## write the generated pages
	$(PYTHON) -m dev.pages
	$(PYTHON) benchmarks/memory_page.py

$(SITE)/.done: requirements/site.txt
	python3 -m venv --clear $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/site.txt
	touch $@

site: $(SITE)/.done ## build the documentation as a site in build/site; a wrong link fails
	$(SITE)/bin/python -m mkdocs build --strict

clean: ## remove .venv and everything that was built
	rm -rf .venv .venv-* build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
