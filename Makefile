# `make` lists what there is. Everything installs into .venv first; set PYTHON to choose the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

# Tests that compute in their own process with one thread: as many files at once as there are cores. The others start
# services, whose times must not depend on what else runs.
COMPUTING := $(addprefix tests/,coordinator cuda draft engine hygiene law models policy protocol simulation target)

.PHONY: help install demo lint test test-fast test-long bench bench-quick bench-engine proto clean

help:  ## List the commands.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specdec needs Python 3.11 or newer; $(PYTHON) is older. Choose one: make PYTHON=/path/to/python3.12 demo"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet -c constraints.txt torch
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

install: $(VENV)/.installed  ## Make .venv and install specdec with its pinned dependencies.

demo: install  ## Start the three services, stream three texts with and without speculation, compare.
	@$(BIN)/specdec demo

lint: install  ## Check types, style and format (a few minutes the first time).
	@$(BIN)/mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

test: install  ## Run the tests (minutes).
	@$(BIN)/python -m pytest -q -n auto --dist loadfile $(COMPUTING)
	@$(BIN)/python -m pytest -q $(addprefix --ignore=,$(COMPUTING))

test-fast: install  ## Run the unit tests only (under a minute).
	@$(BIN)/python -m pytest -q -m 'not slow and not lengthy' tests/protocol tests/law tests/hygiene tests/rpc

test-long: install  ## Run the longer suites too: large samples, sweeps, 1,000 prompts on and off (hours).
	@$(BIN)/python -m pytest -q --timeout 3600 -m 'slow or not slow'
	@$(BIN)/python -m tests.sameness

bench: $(VENV)/.bench-installed  ## All of it, then every bar beside what was reached; some four hours.
	@$(BIN)/python -m bench.draft
	@$(BIN)/python -m bench.overhead
	@$(BIN)/python -m bench.peers
	@$(BIN)/python -m bench.poor_drafts
	@$(BIN)/python -m bench.concurrency --jump --coordinators
	@$(BIN)/python -m bench.pipeline
	@$(BIN)/python -m bench.goals

bench-quick: $(VENV)/.bench-installed  ## The draft's step and the pipeline over a few round trips, in minutes.
	@$(BIN)/python -m bench.draft --quick
	@$(BIN)/python -m bench.pipeline --quick

$(VENV)/.bench-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

bench-engine: $(VENV)/.bench-installed  ## Time the engine: steps, streams, evidence; about 15 minutes.
	@$(BIN)/python -m bench.engine

proto: install  ## Regenerate the stubs in specdec/v1.
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/specdec/v1/*.proto

clean:  ## Remove what the commands above made.
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .hypothesis .ruff_cache
