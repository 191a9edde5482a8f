PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
PROMPT := src/kvant/platform/progress.py
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/native/*)

.PHONY: sanitize fuzz demo site env check test test-avx2 laws format clean
.DEFAULT_GOAL := test

env: $(STAMP)

$(STAMP): $(BUILT_FROM)
	@echo "installing into $(VENV): minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e ".[dev,servers]" || { \
	  echo "without servers: tests that need them are skipped"; $(INSTALL) -e ".[dev]"; }
	@touch $@

# What running needs, and nothing that developing needs.
$(RUNS): $(BUILT_FROM)
	@test -e $(STAMP) || { $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .; }
	@touch $@

demo: $(RUNS)
	$(BIN)/kvant run --file $(PROMPT) --kv-cache affine4 --temperature 0.7 --top-p 0.9 \
	  --repetition-penalty 1.1 --seed 7 --max-new-tokens 128 --stats

# The documentation as a site.
site: env
	@$(INSTALL) -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_imports.py
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/words.py --check

test: env
	$(PYTEST) -n $(WORKERS) --dist loadgroup

# The suite as a processor without AVX-512 sees it: kvant, torch and oneDNN choose each for itself.
test-avx2: env
	KVANT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(PYTEST) -n $(WORKERS) --dist loadgroup

laws: env
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m laws

format: env
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

SANITIZED := build/sanitize/libkvant.so
SECONDS ?= 60
SEED ?= 0
FUZZ = PYTHONPATH=tests $(BIN)/python -m native.fuzz $(SANITIZED)

# Each instruction set that the processor has, as the shell variable `isa`, with the sanitizers
# loaded: $(call each,command).
define each
@isas="$$($(BIN)/python tests/isas.py)" || exit 1; \
for isa in $$isas; do \
  echo "$$isa"; \
  (export LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
     ASAN_OPTIONS=detect_leaks=0 KVANT_ISA=$$isa; $(1)) || exit 1; \
done
endef

.PHONY: $(SANITIZED)
$(SANITIZED): env
	@cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DKVANT_SANITIZE=ON > /dev/null
	@cmake --build build/sanitize

# What the sanitizers find in the kernels: sizes that end inside of tiles, and sizes that lie.
sanitize: $(SANITIZED)
	$(call each,$(FUZZ) --iterations 2000 && $(PYTEST) -q -m "" -p no:cacheprovider \
	  --library build/sanitize tests/attention/test_native.py tests/frames/test_native.py)

# Sizes that lie, for so many seconds on each instruction set, and as long files whose headers were
# forged: make fuzz SECONDS=600 SEED=7.
fuzz: $(SANITIZED)
	$(call each,$(FUZZ) --seconds $(SECONDS) --seed $(SEED))
	$(BIN)/python tests/forged.py --seconds $(SECONDS) --seed $(SEED)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +
