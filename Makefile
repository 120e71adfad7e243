VENV ?= .venv
export VENV
# Quoted, since a folder may contain spaces; started as modules, since scripts contain the path of the environment.
PYTHON := "$(VENV)/bin/python"

# Hundreds of test processes import the same modules; without cached bytecode each of them compiles these again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PYTHON) -m pytest

# Tests that start processes are idle half of the time. A file stays with one worker: its tests share what they start.
# The order is that of tests/conftest.py: files that start processes first.
SEVERAL_AT_A_TIME := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

# Without the architecture test, which `make check` runs.
NOT_SLOW := -m "not slow and not slurm and not attack" --ignore=tests/test_architecture.py

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-mutation browser demo test test-fast test-tools test-slow test-gpu-build test-slurm test-faults test-attack mutation check bench docs site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## create .venv with all that tests and benchmarks need; the targets below call it, and a second run does nothing
	@scripts/setup.sh dev

setup-demo: ## create .venv with what training needs only, half as large
	@scripts/setup.sh demo

setup-mutation: # what `make setup` installs, and cosmic-ray
	@scripts/setup.sh mutation

browser: ## install a headless browser (Debian, as root); without it the tests that open reports in one are skipped
	@scripts/install_chromium.sh

demo: setup-demo ## train a small model on text of this machine, from raw text to validation loss
	@PATH="$$(cd "$(VENV)/bin" && pwd):$$PATH" scripts/demo/run.sh

test: setup ## run all tests except the slow ones and those of tools that did not change; GPU tests are skipped without a GPU
	$(PYTEST) $(NOT_SLOW) --tools=changed $(SEVERAL_AT_A_TIME)

test-fast: setup ## run the first case of every test that starts no process: about a minute
	$(PYTEST) $(NOT_SLOW) --tools=changed --fast $(SEVERAL_AT_A_TIME)

test-tools: setup ## run the tests of tools (megads/tools, megads/tools/plan, scripts) that `make test` leaves out
	$(PYTEST) $(NOT_SLOW) --tools=unchanged $(SEVERAL_AT_A_TIME)

test-slow: setup ## run only the slow tests; selecting none is no failure (SHARE=1/3: the first third of them)
	$(PYTEST) -m "slow and not slurm and not attack" $(if $(SHARE),--share $(SHARE)) $(SEVERAL_AT_A_TIME) || [ $$? -eq 5 ]

test-gpu-build: setup ## build and load the CUDA kernels under CUDA builds of torch 2.11 and 2.13; needs no GPU, but 4.8 GiB in the user's cache
	$(PYTHON) -m scripts.cuda_torch --nvcc -- -m pytest -q tests/ops/cuda/test_compile.py

test-slurm: setup ## run tests on a private SLURM of several nodes on this machine; installs SLURM with apt if permitted (SHARE=1/3)
	@scripts/install_slurm.sh
	$(PYTEST) -m slurm $(if $(SHARE),--share $(SHARE)) tests/slurm

test-faults: setup ## inject every fault of docs/reliability.md and list which guarantees held; SLURM's if it can be installed
	@scripts/install_slurm.sh
	$(PYTEST) -m "fault and not attack" tests

test-attack: setup ## kill at random and at every system call, damage every file, fuzz command lines: about four hours (ROUNDS=20: number of kills)
	$(PYTEST) -m attack -s tests $(if $(ROUNDS),--attack-rounds $(ROUNDS)) --attack-table attack.md

mutation: setup-mutation ## mutation testing: apply 200 mutations to megads/, one at a time, and list those that no test detects (COUNT=, SEED=): an hour
	$(PYTHON) -m scripts.mutation_sample --count $(or $(COUNT),200) --seed $(or $(SEED),1)

check: setup ## check lint, format, types, spelling, YAML and which packages import which
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m codespell_lib
	$(PYTHON) -m yamllint --strict .
	$(PYTEST) -q --durations=0 tests/test_architecture.py

bench: setup ## compare speed and memory with peers and hardware limits (QUICK=1: five minutes)
	$(PYTHON) -m scripts.bench.suite $(if $(QUICK),--quick)

docs: setup ## generate docs/configuration.md and docs/api.md from the code
	$(PYTHON) scripts/docs/configuration.py
	$(PYTHON) scripts/docs/api.py

site: setup ## build docs/ as a site in build/site; broken links fail
	$(PYTHON) scripts/docs/site.py

.PHONY: test-fresh
test-fresh: ## run the README's commands on fresh Debian 12 and 13 systems, as a new user has them; needs root (ONLY=debian12:demo): hours
	@scripts/fresh_machine.sh $(if $(ONLY),--only "$(ONLY)")

.PHONY: wheelhouse
wheelhouse: ## collect the wheels of megads and all that it needs, for machines without network (DEST=wheels, EXTRAS=, TORCH_INDEX=)
	@scripts/wheelhouse.sh "$(or $(DEST),wheels)"

clean: ## remove caches and build output; keeps .venv and runs
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find megads tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
