# Everything from a bare machine with Python 3.11 and g++: `make train` and `make test` set up what they need, once.
#
#   make train      set up, then train the Llama 3 debug model on eight simulated ranks
#   make test       set up, then run the tests
#   make lint       ruff, mypy, clang-format, shellcheck
#   make nightly    the tests that take minutes
#   make sanitize   builds with the address and the thread sanitizer, and the process group's tests on them
#   make build      set up only
#   make clean      remove what was built, keep the virtual environment
#
# RECIPE=recipes/other.toml, ARGS="--training.steps 50" (train) or ARGS="-k collectives" (test, nightly),
# PYTHON=python3.12, VENV=/somewhere/else and TORCHTITAN=0.2.2 can be given.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RECIPE ?= recipes/llama3_debug.toml
TORCH := 2.13.0
# 0.2.1 is the reference: 0.2.2 scales gradients wrongly under DDP and pipeline parallelism.
TORCHTITAN ?= 0.2.1
# One compiler process a core; each takes up to 2 GB.
# nproc counts no more than OMP_NUM_THREADS, which says nothing of compilers.
export MAX_JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
CXX_SOURCES := $(shell find trn_dist/csrc -name '*.cpp' -o -name '*.h')
SHELL_SCRIPTS := $(shell find launch -name '*.sh' -o -name '*.sbatch')

.PHONY: help train test lint nightly sanitize build dev clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

train: build
	$(VENV)/bin/trn train $(RECIPE) $(ARGS)

test: dev
	$(VENV)/bin/python -m pytest $(ARGS)

nightly: dev build/torchtitan-0.2.2
	$(VENV)/bin/python -m pytest -m slow $(ARGS)

sanitize: dev
	tests/sanitize/run.sh address $(VENV)/bin/python tests/c10d $(ARGS)
	tests/sanitize/run.sh thread $(VENV)/bin/python tests/c10d $(ARGS)

# A version with known faults, beside the installed one, for tests/parity/test_upstream_faults.py.
build/torchtitan-0.2.2:
	@mkdir -p build
	$(PIP) install --no-deps --target $@ torchtitan==0.2.2

lint: dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(VENV)/bin/shellcheck .ci/run $(SHELL_SCRIPTS)

build: $(VENV)/.built
dev: $(VENV)/.dev

# Each stamp is a step that need not be repeated until what it depends on changes.

$(VENV)/.python:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "trn_dist needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not on PATH: install python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trn_dist needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || \
	  { echo "trn_dist needs the headers of Python to build, and $(PYTHON) has no Python.h: install python3.11-dev" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || \
	  { echo "trn_dist needs a C++20 compiler to build, and neither c++ nor g++ is on PATH: install g++ 11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "trn_dist is set up in a virtual environment, and $(PYTHON) has no venv: install python3.11-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python Makefile
	@echo "Installing torch $(TORCH) and torchtitan $(TORCHTITAN) in $(VENV); the first time takes minutes"
	$(PIP) install torch==$(TORCH) torchtitan==$(TORCHTITAN) "setuptools>=77" wheel ninja numpy
	@touch $@

# The extension first, with objects kept in build/, then the package, which finds the objects there.
$(VENV)/.extension: $(VENV)/.torch setup.py $(CXX_SOURCES)
	@echo "Building the extension; the first time takes minutes"
	@mkdir -p build
	@$(VENV)/bin/python setup.py --quiet build_ext --inplace >build/extension.log 2>&1 || \
	  { grep -E 'error|trn_dist:' build/extension.log | head -n 20 >&2 || true; \
	    echo "the extension was not built; the whole log: build/extension.log" >&2; exit 1; }
	@touch $@

$(VENV)/.built: $(VENV)/.extension pyproject.toml
	$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.built
	$(PIP) install --no-build-isolation -e ".[dev]"
	@touch $@

clean:
	rm -rf build dist *.egg-info trn_dist/*.so $(VENV)/.extension $(VENV)/.built $(VENV)/.dev
