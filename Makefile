# Two commands do all the set-up, each from a bare clone with only Python 3.11 there: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q
export OMP_NUM_THREADS ?= 1
# `pip check` and every test must see this checkout's packages, never a folder of the same name elsewhere.
export PYTHONSAFEPATH := 1

.PHONY: demo test slow verify docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "axisplan needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing axisplan and torch into $(VENV) (a minute or two the first time)"
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/axisplan demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cli.py profiles cost_models planner
	$(PYTEST) -m 'not slow and not verify'

slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not verify"

verify: $(VENV)/.installed-dev
	$(BIN)/python tests/oracles/install.py --seconds 900
	$(BIN)/python benchmarks/verify.py

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
