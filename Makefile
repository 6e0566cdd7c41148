# Every target sets up what it needs: a fresh clone, a Python and pip are enough.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
SEED ?= 1
CYCLES ?= 2000

BIN := .venv/bin
STAMP := .venv/.installed
SMOKE := --steps 2 --warmup-steps 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-smoke test test-nightly test-bites soak loops bench bench-gpu check docs format format-check lint types imports clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install into .venv what is missing
	@:

# -qq hides progress and warnings; errors still show. The stamp comes last, so that a failed install is tried again.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Train with GRPO on a CPU (ARGS="--steps 5" is handed on)
	@$(BIN)/python examples/grpo.py $(ARGS)

demo-smoke: $(STAMP) ## The demo, two steps
	@$(BIN)/python examples/grpo.py $(SMOKE)

# One thread a process: JOBS processes share the cores. torch and numpy would each start a thread a core.
test: $(STAMP) ## Run the tests (ARGS="-k scope" is handed on; JOBS=0 for one process)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

NIGHTLY := tests/machine tests/session/test_random_tenants.py tests/generation/test_machine.py

test-nightly: $(STAMP) ## Random programs in depth (SEED=2 for others; takes an hour)
	@HYPOTHESIS_PROFILE=nightly OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(NIGHTLY) --hypothesis-seed=$(SEED) --timeout 0 $(ARGS)

test-bites: $(STAMP) ## Take one mechanism after the other away, and show which test notices (ARGS="guard" for some)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/bites/bite_runner.py $(ARGS)

soak: $(STAMP) ## 2,000 cycles of a loop with three participants (CYCLES=100 for fewer): nothing may grow
	@OMP_NUM_THREADS=1 RL_SESSION_SOAK_CYCLES=$(CYCLES) $(BIN)/python -m pytest tests/faults/test_soak.py -s -q --timeout=0 $(ARGS)

loops: $(STAMP) ## Make the scoped loops of migration/loops from the legacy ones
	@cp migration/loops/legacy/*.py migration/loops/scoped/
	@$(BIN)/rl-session migrate migration/loops/scoped --write --quiet

check: format-check lint types imports docs test ## Everything that must hold: format, ruff, mypy, import contracts, docs, tests

bench: $(STAMP) ## Run the benchmarks; numbers in build/bench.json (ARGS="engine scope" for some)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/everything.py $(ARGS)

bench-gpu: $(STAMP) ## Measure a CUDA device (without one: says so)
	@$(BIN)/python benchmarks/gpu.py --json build/bench-gpu.json $(ARGS)

format: $(STAMP) ## Format, and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

format-check: $(STAMP)
	@$(BIN)/ruff format --check --quiet --diff .

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .

types: $(STAMP)
	@$(BIN)/mypy

imports: $(STAMP)
	@$(BIN)/lint-imports --no-logo

docs: $(STAMP) ## Build the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

clean: ## Remove .venv, caches and build outputs
	@rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
