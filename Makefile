VENV ?= .venv
PYTHON_BIN := $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-slow check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## create .venv with the pinned dependencies (a second run does nothing)
	@scripts/setup.sh

demo: setup ## train a small model on text found on this machine, from raw text to validation loss
	@PATH="$(abspath $(PYTHON_BIN)):$$PATH" scripts/demo/run.sh

test: setup ## all tests but the slow ones; GPU tests skip themselves where there is no GPU
	$(PYTHON_BIN)/python -m pytest -m "not slow"

test-fast: setup ## tests in one process only, within two minutes
	$(PYTHON_BIN)/python -m pytest -m "not slow and not distributed"

test-slow: setup ## the slow tests only; finding none is no failure
	$(PYTHON_BIN)/python -m pytest -m slow || [ $$? -eq 5 ]

check: setup ## lint, format, types, spelling, YAML, the walls between the rooms
	$(PYTHON_BIN)/ruff check .
	$(PYTHON_BIN)/ruff format --check .
	$(PYTHON_BIN)/mypy
	$(PYTHON_BIN)/codespell
	$(PYTHON_BIN)/yamllint --strict .
	$(PYTHON_BIN)/python -m pytest -q --durations=0 tests/test_architecture.py

clean: ## remove caches and build output; keeps .venv and runs
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find megads tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
