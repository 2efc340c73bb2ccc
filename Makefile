# The two commands of a newcomer: `make demo` and `make test`. Each makes .venv and installs what it needs; pip's own
# configuration (indexes, find-links, certificates) is honoured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints/host.txt
PROJECT := pyproject.toml constraints/host.txt

.PHONY: demo test check unit slow clean

demo: $(VENV)/.demo
	$(BIN)/rollplex demo

test: check unit

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/pytest

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Rollplex needs Python 3.11 or newer; make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(PROJECT) | $(BIN)/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(PROJECT) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

slow: $(VENV)/.dev
	$(BIN)/pytest --slow

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
