PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

TESTING := CMAKE_ARGS=-DLRD_TESTING=ON
WORKERS ?= 2
PARALLEL := $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: help build check demo test test-slow gpu-check bench bench-quick wheel lint docs stress sanitize clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

# torch first and from its own group: whatever needs torch would otherwise bring a build of its own choice.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -U pip
	$(BIN)/pip install --group torch && $(BIN)/pip install --group dev
	$(TESTING) $(BIN)/pip install --no-build-isolation -e '.[test]' && touch $@

build: $(STAMP) ## the native libraries, only what changed
	$(TESTING) $(BIN)/python setup.py -q build_ext --inplace

demo: build ## trains joint-uncertainty U-Nets on real digits, then a few memory/time points; report in reports/demo
	$(BIN)/lrd-uq demo
	$(BIN)/python -m benchmarks.scaling --quick --restart --output reports/demo/scaling.json

check: build lint ## while working: style, types and the quick tests of what changed since the last commit
	$(BIN)/python tests/changed.py

# Parallel workers, then the tests that need the machine for themselves. Triton interprets or compiles, not both.
test: build ## all tests but the slow ones
	$(PARALLEL) -m "not slow and not alone"
	TRITON_INTERPRET=1 $(PARALLEL) -m "not slow" tests/kernels -k triton
	$(BIN)/pytest -m "not slow and alone"

test-slow: build ## the slow tests
	$(PARALLEL) -m "slow and not alone"
	TRITON_INTERPRET=1 $(PARALLEL) -m slow tests/kernels -k triton
	$(BIN)/pytest -m "slow and alone"

gpu-check: build ## compiles the GPU kernels for every architecture, counts their traffic; rewrites docs/gpu_tables.md
	$(BIN)/python -m benchmarks.gpu.tables

bench: build ## times of every function, log_prob beside its peers, memory/time curves; reports/benchmarks
	$(BIN)/pytest benchmarks -o addopts="-p no:cacheprovider" \
	  --benchmark-only --benchmark-columns=min,median,iqr,rounds
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.scaling

bench-quick: build ## a few points of the memory/time curves beside torch's class, under three minutes
	$(BIN)/python -m benchmarks.scaling --quick --restart

wheel: $(STAMP) ## one wheel in dist/ for every later torch and Python
	rm -rf dist build/lib* build/wheel && CMAKE_ARGS=-DLRD_TESTING=OFF $(BIN)/python -m build --wheel --no-isolation -o build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude libtorch_cpu.so --exclude libtorch_cuda.so -w dist build/wheel/*.whl

lint: $(STAMP) docs ## style, types, and the documentation
	$(BIN)/ruff check && $(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) && $(BIN)/mypy

# Not --quiet: it hides the warnings from --strict, too.
docs: $(STAMP) ## the documentation as a site in build/site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

stress: build ## thousands of adversarial calls of every function beside exact arithmetic, and of damaged files
	$(BIN)/python -m benchmarks.stress

sanitize: $(STAMP) ## the core's own tests under the address and undefined-behaviour sanitizers
	PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B build/sanitize -DLRD_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/sanitize && build/sanitize/core_sanitize

clean: ## removes what was built, not the environment
	rm -rf build dist *.egg-info lrd_kernels/*.so tests/cpp/*.so tests/gpu/*.so
