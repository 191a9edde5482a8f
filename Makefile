PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: native demo env check test laws format clean
.DEFAULT_GOAL := test

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

native:
	@cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release > /dev/null
	@cmake --build build/native
	@cp build/native/libkvant.so src/kvant/attention/native/

demo: env
	$(BIN)/kvant run --kv-cache affine4 --temperature 0.6 --top-p 0.9 --seed 7 --stats

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_imports.py
	$(BIN)/python tools/check_sizes.py

test: env
	$(PYTEST) -n $(WORKERS)

laws: env
	$(PYTEST) -n $(WORKERS) -m laws

format: env
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +
