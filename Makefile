# Every target does all the set-up it needs.
PYTHON ?= python3
VENV ?= .venv
CLIENTS ?= .venv-clients
PROJECTS ?=
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
MINUTES ?=
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
SCHEMAS ?= jsonschema==4.26.0
FUNCTIONS ?= bfcl-eval==2026.3.23
SKYRL ?= skyrl==0.3.0
AXE ?= axe-core@4.14.1

# Prints its argument where there are wheels of Triton and torch has none of its own.
NEEDS_TRITON := import platform, sys; from importlib.metadata import requires; \
  has_wheels = platform.system() == 'Linux' and platform.machine() == 'x86_64'; \
  print(sys.argv[1] if has_wheels and not any(need.startswith('triton') for need in requires('torch')) else '')

# Paths of environments are relative, so that make never meets a space in the path of the folder.
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: serve test check test-lab nightly timing gpu fuzz test-clients test-browser compose-check docs docs-serve lint clean

serve: $(VENV)/.run  ## serve MODEL on HOST:PORT; more flags in ARGS
	@exec $(BIN)/octavo serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: export PYTHONDONTWRITEBYTECODE :=  # tests start processes by the hundred: each would compile all that it imports
test: $(VENV)/.dev  ## run every test but those of `timing`; those that need a GPU are skipped without one
	$(BIN)/python -m pytest $(SPREAD) -m "unit or system or lab" $(ARGS)

# Tiers of tests: tests/tiers.py. Those of some folders alone are named, so that no others are imported.
# Three workers keep two cores busy, as many tests wait for processes.
SPREAD := -n 3 --dist worksteal
CHECK_IN := tests/test_architecture.py tests/test_budget.py tests/test_tiers.py tests/cache tests/engine tests/grammar tests/text tests/server
TEST_LAB_IN := tests/fuzz tests/mutation tests/octavo_bench tests/sim

check: export PYTHONDONTWRITEBYTECODE :=
check: lint  ## style, types, and the tests of all that decides and serves
	$(BIN)/python -m pytest $(SPREAD) -m unit $(CHECK_IN) $(ARGS)

test-lab: export PYTHONDONTWRITEBYTECODE :=
test-lab: $(VENV)/.dev  ## the tests of benchmarks, simulations, fuzzers and mutations
	$(BIN)/python -m pytest $(SPREAD) -m lab $(TEST_LAB_IN) $(ARGS)

nightly: export PYTHONDONTWRITEBYTECODE :=
nightly: $(VENV)/.dev  ## further shapes and longer runs
	$(BIN)/python -m pytest $(SPREAD) -m nightly $(ARGS)

timing: $(VENV)/.dev  ## tests that compare times, on a machine that has nothing else to do
	$(BIN)/python -m pytest -m timing $(ARGS)

gpu: $(VENV)/.dev  ## on a machine with a GPU: its tests, then kernels, throughput, steps and vLLM's server beside ours with MODEL; records in gpu-records/
	-$(BIN)/python -m pytest -q tests/gpu
	-$(BIN)/octavo bench kernels --output gpu-records/kernels.json
	-$(BIN)/octavo bench throughput $(MODEL) --output gpu-records/throughput.json
	-$(BIN)/octavo bench profile $(MODEL) --output gpu-records/profile.json
	$(BIN)/octavo bench peer $(MODEL) --engine vllm --output gpu-records/peer.json

fuzz: $(VENV)/.fuzz  ## fuzz what reads untrusted input, for some 20 minutes or MINUTES; targets and limits in ARGS
	$(BIN)/python -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

test-clients: $(VENV)/.dev $(CLIENTS)/.done  ## drive a server with other projects' clients: docs/clients.md
	OCTAVO_CLIENTS="$$(realpath $(CLIENTS))" OCTAVO_PROJECTS="$(and $(PROJECTS),$$(realpath "$(PROJECTS)"))" \
	  $(BIN)/python -m pytest tests/clients $(ARGS)

test-browser: $(VENV)/.browser  ## drive the console with Chromium, which must be on the path; accessibility by axe-core where there is npm
	OCTAVO_AXE="$$(realpath -q $(VENV)/axe/node_modules/axe-core/axe.min.js)" $(BIN)/python -m pytest tests/server/console $(ARGS)

compose-check: $(VENV)/.dev  ## check what is in deploy/; every query of the dashboard with Prometheus, where there is one
	$(BIN)/python -m pytest tests/deploy $(ARGS)

docs: $(VENV)/.docs  ## build the pages of docs/ into site/; a broken link is an error
	$(BIN)/python -m mkdocs build --quiet

docs-serve: $(VENV)/.docs  ## show the pages on HOST:PORT, and build them again when they change
	$(BIN)/python -m mkdocs serve --dev-addr $(HOST):$(PORT)

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check octavo octavo_kernels octavo_server octavo_fleet octavo_bench tests docs
	$(BIN)/ruff format --check octavo octavo_kernels octavo_server octavo_fleet octavo_bench tests docs
	$(BIN)/mypy --num-workers 2

clean:
	rm -rf $(VENV) $(CLIENTS)

$(BIN)/python:
	@echo "octavo: making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "octavo: installing what serving needs, once"
	$(PIP) install --upgrade "pip>=23.3"
	$(PIP) install $(TORCH)
	$(PIP) install -e .
	@touch $@

# Kernels are tested with the oldest Triton that serves, whose compiler takes least, where torch does not bring its own.
$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -e ".[test,lint]" $$($(BIN)/python -c "$(NEEDS_TRITON)" "$(TRITON)")
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) install -e ".[test,fuzz]"
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) install -e ".[test,browser]"
	-npm install --no-audit --no-fund --prefix $(VENV)/axe "$(AXE)"
	@touch $@

# The documents are built without what the engine needs.
$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Clients have dependencies of their own, so they never meet the server's: each file of requirements is an environment.
# Without npm those of Node are skipped. Two packages are there for the JSON schemas in them alone.
$(CLIENTS)/.done: $(wildcard tests/clients/requirements/*.txt) tests/clients/package.json Makefile
	@echo "octavo: installing client packages in $(CLIENTS)"
	$(PYTHON) -m venv $(CLIENTS)/main
	$(CLIENTS)/main/bin/python -m pip --disable-pip-version-check install uv $(TORCH)
	for name in $(basename $(notdir $(wildcard tests/clients/requirements/*.txt))); do \
	  $(PYTHON) -m venv $(CLIENTS)/$$name && \
	  $(CLIENTS)/main/bin/uv pip install --python $(CLIENTS)/$$name/bin/python -r tests/clients/requirements/$$name.txt || exit 1; \
	done
	$(CLIENTS)/main/bin/uv pip install --python $(CLIENTS)/main/bin/python --no-deps "$(FUNCTIONS)"
	$(CLIENTS)/main/bin/uv pip install --python $(CLIENTS)/trainers/bin/python --no-deps "$(SKYRL)"
	$(CLIENTS)/main/bin/python -m pip --disable-pip-version-check download --no-deps --no-binary jsonschema -d $(CLIENTS) "$(SCHEMAS)"
	tar -xzf $(CLIENTS)/jsonschema-*.tar.gz -C $(CLIENTS)
	cp tests/clients/package.json $(CLIENTS)/
	-cd $(CLIENTS) && npm install --no-audit --no-fund
	@touch $@
