# The two commands of a newcomer: `make demo` and `make test`. Each makes .venv and installs what it needs; pip's own
# configuration (indexes, find-links, certificates) is honoured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints/host.txt
PROJECT := pyproject.toml constraints/host.txt

BESIDE := tests/e2e tests/rollout tests/trace tests/trainer tests/tune tests/verify tests/worker

# Many of the tests' processes import torch and transformers, which takes six times as long without their bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check unit aside nodes parts clean

demo: $(VENV)/.demo
	$(BIN)/rollplex demo

# Whole nodes wait much and compute little, so they run beside the other tests, each with folders of its own; with them the
# folders that would come last, so that both end at about the same time. The checks run beside both at the lowest priority,
# so that no test that watches the clock waits for them. What runs aside is shown at its end.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs=3 aside nodes parts

aside: $(VENV)/.dev
	@nice -n 19 $(MAKE) --no-print-directory check >$(VENV)/check.log 2>&1; code=$$?; echo; cat $(VENV)/check.log; exit $$code

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

nodes: $(VENV)/.dev
	@$(BIN)/pytest $(BESIDE) >$(VENV)/nodes.log 2>&1; code=$$?; echo; cat $(VENV)/nodes.log; exit $$code

parts: $(VENV)/.dev
	$(BIN)/pytest $(BESIDE:%=--ignore=%)

unit: $(VENV)/.dev
	$(BIN)/pytest

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Rollplex needs Python 3.11 or newer; make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(PROJECT) | $(BIN)/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(PROJECT) | $(BIN)/python
	$(PIP) --no-compile --editable '.[dev]'  # most of what is installed is never imported
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
