# `make demo` and `make test` set up everything they need in .venv; the second call is quick.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.10 or later)
#   PIP_ARGS="..."      more arguments for pip, such as an index with CPU-only torch wheels
#   PYTEST_ARGS="..."   more arguments for pytest

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
NATIVE := $(wildcard src/zenflow/kernels/native/*.cpp src/zenflow/kernels/native/*.h \
  src/zenflow/kernels/native/build.py)

.PHONY: help demo test fuzz convergence convergence-report check format-check lint types layers format hooks clean

help:
	@echo "make demo    fine-tune a small language model, offline, in a few minutes"
	@echo "make test    run the tests"
	@echo "make check   what CI runs: format-check, lint, types, layers, test"
	@echo "make fuzz    random sequences of calls against the oracle, for SECONDS=60"
	@echo "make convergence         every run that has no result yet; ARGS='--jobs 2 --budget 60 --only A'"
	@echo "make convergence-report  docs/convergence.md from the results"
	@echo "make format  format the code and fix what can be fixed"
	@echo "make hooks   run the quick checks before each commit"
	@echo "make clean   remove .venv, caches and builds; trained models stay"

demo: $(INSTALLED)
	$(BIN)/zenflow finetune

test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

SECONDS ?= 60

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

ARGS ?=

convergence: $(INSTALLED)
	$(BIN)/python -m benchmarks.convergence run $(ARGS)

convergence-report: $(INSTALLED)
	$(BIN)/python -m benchmarks.convergence report

check: format-check lint types layers test

format-check: $(INSTALLED)
	$(BIN)/ruff format --check .

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

layers: $(INSTALLED)
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

# Also rebuilds the native kernel. A .venv that does not work (any more) is made anew.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(NATIVE)
	@command -v $(PYTHON) >/dev/null || \
	  { echo "error: '$(PYTHON)' was not found; install Python 3.10 or later, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or later is needed, '$(PYTHON)' is $$($(PYTHON) --version 2>&1); set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: '$(PYTHON)' cannot make virtual environments; on Debian: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --constraint constraints.txt --editable '.[finetune,dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	rm -rf src/*.egg-info src/zenflow/kernels/native/*.so
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
