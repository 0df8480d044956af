# `make test` and `make demo` need git, make and Python 3.11 to 3.13; everything else they fetch themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help test demo lint format e2e bench bench-layer matrix clean

help:
	@echo "make test    every test, against a real sglang server on the CPU (built on first use)"
	@echo "make demo    surgeon's whole job, shown on that server"
	@echo "make lint    ruff, ruff format, mypy"
	@echo "make bench   speed, as ratios measured side by side"
	@echo "make bench-layer   what fewer experts are worth to a layer, on this CPU"
	@echo "make matrix  every sglang release since 0.4.6: found, grafted, taken out again, imported"

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or later on PATH, found none"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

# Two workers: one has the lab, the other the tests that start servers of their own (tests/conftest.py).
test: $(STAMP)
	$(BIN)/python -m pytest -n 2

demo: $(STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m surgeon.lab.demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/run.py

bench-layer: $(STAMP)
	$(BIN)/python tests/benchmarks/moe_layer.py

matrix: $(STAMP)
	$(BIN)/python tests/matrix/run.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
