# Everything from a fresh machine: `make demo`, `make test`, `make lint`.  Needs Python 3.11 or 3.12 and GNU make.
#
#   make demo PIP_ARGS=                     newest releases instead of the tested ones
#   make test PYTHON=python3.12 VENV=.venv312

PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?= -c constraints/cpu.txt
EXTRAS   ?= test,hf

BIN  := $(VENV)/bin
CODE := $(wildcard moecompile passes runtime tests examples benchmarks)

# One thread per rank: the ranks of a test or of the demo share this machine's cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint clean

help:
	@echo "make demo   train a small MoE model on 4 local ranks, beside one process"
	@echo "make test   lint, then every test that needs no GPU and is not slow"
	@echo "make lint   ruff, mypy --strict"

# Test files at a time; each test runs on one thread.
WORKERS := 2

# The stamp goes stale when the dependencies change; the package itself is installed editable.
comma := ,
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

$(INSTALLED): pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moecompile needs Python 3.11 or later; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[$(EXTRAS)]'
	touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m moecompile demo $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' -n $(WORKERS) --dist loadfile $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
