# Four verbs. `make demo` and `make test` set up everything they need in .venv on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := .stamps

.PHONY: demo test check bench native arm clean
.DEFAULT_GOAL := demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Foreword needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -type f ! -name '*.so' ! -name '*.pyc')
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The build's own tools live in .venv, so that a second build only compiles what changed.
$(STAMPS)/build-tools: $(BIN)/python
	$(PIP) 'scikit-build-core>=0.10' 'nanobind>=2.4' cmake ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/install: $(STAMPS)/build-tools $(SOURCES)
	$(PIP) --no-build-isolation .
	@touch $@

$(STAMPS)/%: $(STAMPS)/install  # the extras: test, dev
	$(PIP) --no-build-isolation '.[$*]'
	@touch $@

demo: $(STAMPS)/install  ## build, get the default model, answer a prompt, show the first steps' tables
	$(BIN)/foreword models pull smollm2
	$(BIN)/foreword run "What is the capital of France? Answer in one sentence." --max-tokens 24 --explain

test: $(STAMPS)/test  ## everything, the default model included
	$(BIN)/python -m pytest

check: $(STAMPS)/dev  ## format, lint, types
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/mypy

bench: $(STAMPS)/install  ## host cost of a step, as ratios in one run
	$(BIN)/foreword bench host

native:  ## rebuild the native module in place, for work on the sources (PYTHONPATH=src)
	cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	cmake --build build/dev
	cp build/dev/_native*.so src/foreword/

arm: $(BIN)/python  ## the NEON kernels against the scalar ones, cross-compiled and emulated
	$(BIN)/python tools/arm/check.py

clean:
	rm -rf $(VENV) $(STAMPS) build dist src/foreword/_native*.so
