# `make help` lists the targets. Needed: Python >= 3.11, make, a package index that pip can reach.
#   make demo ARGS="--density 0.001 --steps 800"     arguments for the demo
#   make test ARGS="-k partition" JOBS=4             arguments for pytest, number of processes
#   make test PYTHON=python3.12 VENV=.venv-3.12      another Python, beside the first

VENV ?= .venv
JOBS ?= 2
ARGS ?=
# The first Python that is new enough.
PYTHON ?= $(shell for python in python3 python python3.14 python3.13 python3.12 python3.11; do \
  $$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# Folders too: their time changes when a file is removed from them.
SOURCES := $(shell find exdyna_jax ! -name '*.pyc' ! -name __pycache__)

.DEFAULT_GOAL := help
# Two installations at once would disturb each other, whatever -j says.
.NOTPARALLEL:
.PHONY: help demo demo-multihost compare test fuzz soak lint format types clean same-python
.PHONY: aot-tpu aot-cuda

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  */\1	/p' Makefile

demo: $(VENV)/.wheel $(VENV)/.examples  ## train a CNN on MNIST, dense and sparse, on 8 CPU devices
	$(VENV)/bin/python examples/train_mnist.py $(ARGS)

demo-multihost: $(VENV)/.wheel $(VENV)/.examples  ## the same in 4 processes, which talk as 4 machines would
	$(VENV)/bin/python examples/launch.py -n 4 -- examples/multihost.py --steps 200 $(ARGS)

compare: $(VENV)/.wheel $(VENV)/.examples  ## compare the sparsifiers: balance, traffic, time, accuracy
	$(VENV)/bin/python benchmarks/compare.py $(ARGS)

# Root, as network namespaces need it; elsewhere it says so and does nothing.
network: $(VENV)/.wheel $(VENV)/.examples  ## time exchanges and training between hosts with slow links
	$(VENV)/bin/python benchmarks/network.py $(ARGS)

# -P and pytest's settings keep the source tree off sys.path: what is tested, doctests included,
# is the wheel.
test: $(VENV)/.wheel $(VENV)/.examples $(VENV)/.test  ## run all tests and doctests on the wheel
	$(VENV)/bin/python -P -m pytest -n $(JOBS) tests --pyargs exdyna_jax $(ARGS)

fuzz: $(VENV)/.wheel $(VENV)/.test  ## check 2,000 random configurations, step by step (nightly)
	$(VENV)/bin/python tests/fuzz.py $(ARGS)

soak: $(VENV)/.wheel  ## 20,000 steps on 8 CPU devices: memory, compilations, density, agreement
	$(VENV)/bin/python benchmarks/soak.py $(ARGS)

lint: $(VENV)/.dev  ## check rules and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev  ## repair what lint finds, where that is possible
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.dev  ## check types
	$(VENV)/bin/mypy

aot-tpu:  ## compile a training step for TPUs that are not there, show what is in it (1.3 GB)
aot-cuda:  ## the same for GPUs (1.2 GB)
# Compilers for other hardware need environments of their own; the rules below make them too.
aot-tpu aot-cuda: aot-%:
	@$(MAKE) --no-print-directory VENV=.venv-$* .venv-$*/.wheel .venv-$*/.$*
	.venv-$*/bin/python benchmarks/aot.py --platform $* $(ARGS)

clean:  ## remove the environments, builds and caches
	rm -rf $(VENV) .venv-tpu .venv-cuda build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find exdyna_jax examples tests -name __pycache__ -prune -exec rm -rf {} +

# The files below are stamps, touched last: an interrupted installation starts again.

# The build backend is installed once, so that building a wheel needs no network afterwards.
$(VENV)/.created: | same-python
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "hatchling>=1.27"
	@touch $@

$(VENV)/.wheel: pyproject.toml README.md LICENSE $(SOURCES) | $(VENV)/.created
	rm -rf $(VENV)/wheel
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/wheel .
	$(PIP) install --no-deps --force-reinstall $(VENV)/wheel/exdyna_jax-*.whl
	@touch $@

# The wheel is installed by now, so these only add what it and the extra require.
$(VENV)/.examples: pyproject.toml examples/data-packages.txt | $(VENV)/.wheel
	$(PIP) install "exdyna_jax[examples]"
	$(PIP) install --no-deps -r examples/data-packages.txt
	@touch $@

$(VENV)/.test $(VENV)/.dev: $(VENV)/.%: pyproject.toml | $(VENV)/.wheel
	$(PIP) install "exdyna_jax[$*]"
	@touch $@

# What JAX itself names, so that all versions go together. CUDA's libraries are needed to run only.
$(VENV)/.tpu: pyproject.toml | $(VENV)/.wheel
	$(PIP) install exdyna_jax "jax[tpu]"
	@touch $@

$(VENV)/.cuda: pyproject.toml | $(VENV)/.wheel
	$(PIP) install exdyna_jax "jax[cuda12-local]" nvidia-cuda-nvcc-cu12
	@touch $@

# An environment keeps the Python that it was made with: asking for another must not go unheard.
same-python:
	@if [ -e $(VENV)/.created ] && [ "$(origin PYTHON)" != "command line" ]; then \
	  exit 0; \
	elif [ -z "$(PYTHON)" ]; then \
	  echo "No Python >= 3.11 found: install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	elif ! $(PYTHON) -c '$(NEW_ENOUGH)'; then \
	  echo "$(PYTHON) is no Python >= 3.11: name another: make PYTHON=/path/to/python" >&2; exit 1; \
	elif [ -e $(VENV)/.created ] && \
	  [ "$$($(PYTHON) -c '$(VERSION)')" != "$$($(VENV)/bin/python -c '$(VERSION)')" ]; then \
	  echo "$(VENV) holds another Python than $(PYTHON): add VENV=.venv-other, or make clean" >&2; exit 1; \
	fi
