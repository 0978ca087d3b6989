# make demo: the whole thing on a small data set. make test: everything. Both first install what they need, once.
PYTHON ?= python3
ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.demo-installed
CODE := offload launchers examples benchmarks tests docs/conf.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-lowest matrix soak bench gpu-check check format map docs lock clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 11

install: $(INSTALLED) ## make the environment in .venv (PYTHON=python3.12 for another Python)

# Python may write bytecode: the environment of a demo is installed without, and each process would compile torch anew.
demo: export PYTHONDONTWRITEBYTECODE =
demo: $(DEMO_INSTALLED) ## compare a DataLoader with offload on JPEG files, then train; writes runs/demo (installs only what this needs)
	$(BIN)/offload demo --overwrite $(ARGS)

# Python may write bytecode: otherwise each of several hundred processes compiles offload, and pytest its tests, each time.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED) ## run all tests, three at a time (ARGS="-k name" for some, JOBS=0 for one by one); says their CPU minutes
	$(BIN)/python -m tests.programs.cpu_minutes $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadscope $(ARGS)

test-lowest: $(BIN)/uv ## a quick part of the tests with the lowest version of each requirement, in an environment in build/lowest
	PYTHON=$(CURDIR)/$(BIN)/python ./tests/programs/lowest.sh $(ARGS)

matrix: $(INSTALLED) ## other versions of Ray, Python and torch; writes benchmarks/results/compatibility.json (ARGS="--only ray2.50")
	$(BIN)/python -m benchmarks.compatibility -o benchmarks/results/compatibility.json $(ARGS)

bench: $(INSTALLED) ## the ratios that matter against their record, ten minutes on two idle cores; exit code 1 if one is worse
	$(BIN)/python -m benchmarks.guard $(ARGS)

soak: $(INSTALLED) ## what takes too long for every change, before a release: an hour; writes benchmarks/results/soak.json
	$(BIN)/python -m benchmarks.soak $(ARGS)

# No prerequisite: a GPU machine may have no index to install from, but a Python of its own with torch.
gpu-check: ## what only a GPU can show, in ten minutes; writes benchmarks/results/gpu.json (ARGS="--wheel FOLDER" without an index)
	$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py -o benchmarks/results/gpu.json $(ARGS)

check: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff repair and format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

map: $(INSTALLED) ## write docs/map.md (modules), docs/tutorial.md (diffs), docs/compatibility.md and docs/evidence.md (records) anew
	$(BIN)/python -m tests.programs.folder_map
	$(BIN)/python -m tests.programs.tutorial_page
	$(BIN)/python -m tests.programs.compatibility_page
	$(BIN)/python -m tests.programs.evidence_page

docs: $(INSTALLED) ## build the documentation site in site/; warnings and broken links are errors
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . site
	@echo site/index.html

lock: $(BIN)/uv ## write requirements.txt anew from pyproject.toml (ARGS=--upgrade for newer versions)
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--no-header --no-emit-index-url --no-emit-find-links --quiet $(ARGS) -o requirements.txt
	@! grep -nE '://|^-' requirements.txt || { echo "requirements.txt must hold no addresses" >&2; exit 1; }

clean: ## remove the environment, caches and builds; runs/ stays
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) docs -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs uv and uv the rest: much faster, and both torch and torchvision come from one place.
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || \
		{ echo "offload needs Python 3.11 to 3.14, found: $$($(PYTHON) --version 2>&1); say make install PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

UV_PIP_INSTALL := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install
FIT := $(BIN)/python -c 'import torchvision.ops' || \
	{ echo "torch and torchvision do not fit together: install both from the same place" >&2; exit 1; }

# What offload itself needs and the demo's images, in the versions of requirements.txt. Bytecode comes as modules are imported: compiling
# all of torch takes longer than the demo.
$(DEMO_INSTALLED): requirements.txt pyproject.toml | $(BIN)/uv
	$(UV_PIP_INSTALL) --constraint requirements.txt -e '.[demo]'
	@$(FIT)
	@touch $@

# Bytecode is compiled here, once: where Python may not write it (PYTHONDONTWRITEBYTECODE, a read-only environment), each
# of the processes that Ray starts would compile torch anew, which is two thirds of the time that importing it takes.
$(INSTALLED): requirements.txt pyproject.toml | $(BIN)/uv
	$(UV_PIP_INSTALL) --compile-bytecode -r requirements.txt
	$(UV_PIP_INSTALL) --no-deps -e .
	@$(FIT)
	@touch $(DEMO_INSTALLED) $@
