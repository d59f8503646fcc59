# `make demo` and `make test` set up everything they need in .venv; the second call is quick.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.10 or later)
#   PIP_ARGS="..."      more arguments for pip, such as an index with CPU-only torch wheels
#   PYTEST_ARGS="..."   more arguments for pytest
#   GPU_CHECK_ARGS="..." arguments of benchmarks/gpu_check.py

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
NATIVE := $(wildcard src/zenflow/kernels/native/*.cpp src/zenflow/kernels/native/*.h \
  src/zenflow/kernels/native/build.py)

.PHONY: help demo test fuzz soak gpu-check convergence convergence-report check format-check lint types layers format \
  hooks clean bench bench-kernel bench-overlap bench-train bench-memory deepspeed

help:
	@echo "make demo    fine-tune a small language model, offline, in a few minutes"
	@echo "make test    run the tests"
	@echo "make check   what CI runs: format-check, lint, types, layers, test"
	@echo "make fuzz    random sequences of calls against the oracle, for SECONDS=60"
	@echo "make soak    long runs that fail if memory, threads or file descriptors grow; some minutes"
	@echo "make gpu-check  correctness, races, speed and memory on a GPU (no .venv: PYTHON needs torch)"
	@echo "make convergence         every run that has no result yet; ARGS='--jobs 2 --budget 60 --only A'"
	@echo "make convergence-report  docs/convergence.md from the results"
	@echo "make format  format the code and fix what can be fixed"
	@echo "make hooks   run the quick checks before each commit"
	@echo "make bench   every report of benchmarks/results; bench-kernel, bench-overlap, bench-train,"
	@echo "             bench-memory make one. DEEPSPEED_PYTHON=PATH puts DeepSpeed beside ours"
	@echo "make deepspeed  such an interpreter, .venv-deepspeed/bin/python"
	@echo "make clean   remove .venv, caches and builds; trained models stay"

demo: $(INSTALLED)
	$(BIN)/zenflow finetune

test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

SECONDS ?= 60

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py

# Without .venv: an interpreter with torch for the GPU that is there is enough.
gpu-check:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

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

# Reports go to RESULTS. DEEPSPEED_PYTHON, such as .venv-deepspeed/bin/python, puts DeepSpeed beside
# ours; BENCH_ARGS are more flags for the one benchmark.
RESULTS ?= benchmarks/results/
DEEPSPEED_PYTHON ?=
BENCH_ARGS ?=
BENCH = $(BIN)/zenflow bench $(1) --output $(RESULTS) \
  $(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON)) $(BENCH_ARGS)

# One after the other, whatever -j says: they would measure each other.
bench: $(INSTALLED)
	$(call BENCH,kernel)
	$(call BENCH,overlap)
	$(call BENCH,train)
	$(call BENCH,memory)

bench-kernel bench-overlap bench-train bench-memory: $(INSTALLED)
	$(call BENCH,$(@:bench-%=%))

# An interpreter of its own, because DeepSpeed runs in it on the CPU only.
DEEPSPEED_BIN := .venv-deepspeed/bin

deepspeed: .venv-deepspeed/.installed

.venv-deepspeed/.installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-deepspeed
	$(DEEPSPEED_BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --constraint constraints.txt torch numpy ninja psutil packaging setuptools wheel transformers
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED_BIN)/python -m pip install --quiet \
	  --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --no-build-isolation \
	  deepspeed==0.19.6
	@touch $@

clean:
	rm -rf .venv .venv-deepspeed .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	rm -rf src/*.egg-info src/zenflow/kernels/native/*.so
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
