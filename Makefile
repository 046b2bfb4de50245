# Every target is listed by `make help`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pip is asked for to get torch: a version, your own wheel, or a version of another index, for example
# TORCH=/wheels/torch-2.11.0+cu130-cp312-cp312-linux_x86_64.whl or
# TORCH="torch==2.13.0 --index-url https://index.example.org/whl/cpu".
TORCH ?= torch==2.13.0
# What `make test` passes on to pytest, for example ARGS="tests/quire -k cli".
ARGS ?=
MODEL ?= demo
PROTOC_VENV := build/protoc
PUBLIC_PROTOS := quire/v1/generation.proto quire/v1/model.proto quire/admin/v1/admin.proto
INTERNAL_PROTOS := quire/plan/v1/plan.proto quire/link/v1/link.proto

.DEFAULT_GOAL := help
.PHONY: help setup run test sim lint format protos protos-check model clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# torch goes first and alone: resolved together with the rest, pip would take gigabytes of CUDA packages. One that is
# there already (you installed it yourself, or an earlier run did) is kept.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "installing $(TORCH) into $(VENV)" && \
	  $(BIN)/pip install --quiet --disable-pip-version-check $(TORCH); }
	@echo "installing Quire and what it needs into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[worker,dev]'
	@touch $@

setup: $(VENV)/.installed ## create .venv with everything that run and test need

# On a terminal the service gets a process group of its own, so that Ctrl-C ends it and not make, and the exit is clean.
run: setup ## serve the embedded model, show one streamed answer, keep serving until Ctrl-C
	@if [ -t 0 ]; then set -m; $(BIN)/quire serve --model $(MODEL) --show-sample & fg > /dev/null; \
	 else exec $(BIN)/quire serve --model $(MODEL) --show-sample; fi

test: setup ## every promise that can be checked in 15 minutes on 2 cores
	@exec $(BIN)/python -m tests.run $(ARGS)

sim: setup ## simulate the scheduler with faults for ten minutes on all cores
	@exec $(BIN)/quire sim --minutes 10

lint: setup ## ruff, mypy --strict, buf lint, buf breaking, generated stubs up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint
	@if git rev-parse --verify --quiet origin/main >/dev/null; \
	 then $(BIN)/buf breaking --against '.git#branch=origin/main'; \
	 elif git cat-file -e main:buf.yaml 2>/dev/null; then $(BIN)/buf breaking --against '.git#branch=main'; fi

format: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The generated code must not be newer than the oldest protobuf runtime we support, so its compiler has its own venv.
$(PROTOC_VENV)/.installed:
	$(PYTHON) -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/pip install --quiet grpcio-tools==1.76.0 mypy-protobuf==5.1.0
	touch $@

protos: $(PROTOC_VENV)/.installed ## generate Python code from protos/
	PATH="$(PROTOC_VENV)/bin:$$PATH" $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PUBLIC_PROTOS)
	PATH="$(PROTOC_VENV)/bin:$$PATH" $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos \
	  --python_out=protos --mypy_out=quiet:protos $(INTERNAL_PROTOS)

protos-check: protos ## fail when the committed generated code is not what protos/ says
	git diff --exit-code -- quire/v1 protos

model: setup ## train the embedded model again (up to 3 hours on 2 cores, resumable)
	$(BIN)/python -m tools.demo_model.train

clean: ## remove what can be made again
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
