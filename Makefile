# `make serve` and `make test` each set up what they need; Python 3.11 or newer is all that must be there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

.PHONY: serve test test-all lint format bench clean

serve: $(VENV)/serve.stamp
	$(BIN)/trunkline serve $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.served $(ARGS)

clean:
	rm -rf $(VENV) .state

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: where a machine has its own build of it, that one is kept
$(VENV)/serve.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/test.stamp: $(VENV)/serve.stamp
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp
	$(PIP) -e '.[bench]'
	touch $@
