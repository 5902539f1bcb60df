# Two commands: `make demo` trains and compares five small models; `make test` checks the package.
# Each sets up .venv on its first run, with nothing but Python 3.11, make and a package index.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: demo test test-slow lint wheel clean

demo: .venv/.package
	$(BIN)/tensorformer compare recipes/demo.toml

test: .venv/.dev
	$(PYTEST) -m "not slow and not real"

test-slow: .venv/.dev
	$(PYTEST) -m "slow or real" --timeout 900

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

# Builds the wheel and uses it where nothing of this folder can be imported by accident.
wheel: .venv/.dev
	rm -rf dist build/clean
	$(BIN)/python -m build --quiet --wheel
	$(PYTHON) -m venv build/clean/.venv
	build/clean/.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	build/clean/.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd build/clean && .venv/bin/python -c "import tensorformer; print('imported', tensorformer.__version__, 'from the wheel')"
	cd build/clean && .venv/bin/tensorformer list attention

clean:
	rm -rf .venv build dist runs

# torch comes first and pinned, or another package would choose its build.
.venv/.torch: constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'tensorformer needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

.venv/.package: .venv/.torch pyproject.toml
	$(INSTALL) --editable .
	touch $@

.venv/.dev: .venv/.package
	$(INSTALL) --editable ".[dev]"
	touch $@
