# Everything a newcomer runs. Needs nothing but Python 3.11 or newer (PYTHON=... picks one) and pip's own index.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST := .venv-oldest
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup lint imports format types test test-fast test-oldest demo bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## make .venv and install everything into it, pinned by constraints.txt

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer, please: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,demo]'
	touch $@

lint: setup imports ## ruff (rules and format) and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The import linter walks a package tree: it gets one, in which kernels/ (a namespace) is walked too.
imports: setup
	rm -rf $(VENV)/imports && mkdir -p $(VENV)/imports/regraft
	cp -r rewriter passes runtime kernels $(VENV)/imports/regraft/
	PYTHONPATH=$(VENV)/imports $(BIN)/lint-imports --no-logo --no-cache

format: setup ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy, strict, over the package
	mkdir -p $(VENV)/types && ln -sfn "$(CURDIR)" $(VENV)/types/regraft
	MYPYPATH=$(VENV)/types $(BIN)/mypy -p regraft.rewriter -p regraft.passes -p regraft.runtime -p regraft.kernels -m regraft

# Tiny models are fastest on one thread each; two workers fill two cores.
test test-fast test-oldest: export OMP_NUM_THREADS = 1

test: lint types ## lint, types and every test
	$(PYTEST) -n $(WORKERS) --dist=loadgroup

test-fast: setup ## the tests without those marked slow
	$(PYTEST) -n $(WORKERS) --dist=loadgroup -m 'not slow'

test-oldest: ## what leans on torch's internals, under the oldest torch (a download of gigabytes)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v -E '^(torch|triton)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt torch==2.11.0 --editable '.[test,demo]'
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist=loadgroup tests/backend tests/passes tests/rewriter tests/runtime

demo: setup ## a real model answers eight chats at once, measured beside transformers
	$(BIN)/python examples/quickstart.py $(MODEL)

bench: setup ## 32 ragged chats on the CPU: Regraft beside transformers' own ways
	$(BIN)/python examples/benchmark_cpu.py

clean: ## remove .venv and every cache
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
