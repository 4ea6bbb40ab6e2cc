# Everything runs from .venv and .cache; nothing is installed elsewhere.
PYTHON ?= python3
PYTEST_ARGS ?= -n 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint bench criu clean

help:
	@echo "make demo   capture and restore a real process"
	@echo "make test   lint, types, import direction, the whole test suite"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  the benchmarks, as tables and JSON in .cache/bench"
	@echo "make criu   private copies of CRIU 4.1 and 4.2 (and redis) in .cache"

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

criu:
	scripts/criu

demo: $(INSTALLED)
	-scripts/criu
	$(BIN)/python scripts/demo.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts/criu
	$(BIN)/mypy scripts/private-packages
	$(BIN)/lint-imports

test: lint
	-scripts/criu
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(INSTALLED)
	-scripts/criu
	$(BIN)/python -m pip install --quiet --group bench
	mkdir -p .cache/bench
	$(BIN)/python bench/dedup.py --json .cache/bench/dedup.json
	$(BIN)/python bench/coding.py --json .cache/bench/coding.json
	$(BIN)/python bench/ingest.py --json .cache/bench/ingest.json
	$(BIN)/python bench/ingest.py --bytes 64m --runs 1 --memory 16 --json .cache/bench/memory.json
	$(BIN)/python bench/catalog.py --json .cache/bench/catalog.json
	$(BIN)/python bench/restore.py --json .cache/bench/restore.json
	$(BIN)/python bench/capture.py --json .cache/bench/capture.json

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
