# make help       what there is
# PYTHON=…        interpreter for a new virtual environment (3.10 to 3.13; 3.14 has not been tried yet)
# VENV=…          where the virtual environment lives
# PIP_ARGS=…      more for pip install, e.g. another package index
# MINUTES=…       how long the soak runs; SEED=… chooses its scenarios, SCENARIO=17,4003 repeats some
# ARGS=…          more for pytest or the benchmarks; tests run in parallel unless it names a file of tests

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
MINUTES ?= 10
SEED ?= 1
SCENARIO ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A file stays with one worker, which makes what its tests share once.
WORKERS = $(if $(findstring .py,$(ARGS)),,-n auto --dist loadfile --no-loadscope-reorder)
HOST_TOOLS := sshd:openssh-server ssh:openssh-client ip:iproute2 sshfs:sshfs tcsh:tcsh ch-run:charliecloud \
  slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Set, it would have each of the hundreds of processes that tests start compile our code again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow soak check docs dist size bench bench-peers clean tools-demo tools-test

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: tools-demo $(INSTALLED) ## two nodes on this machine: partition, train, collect
	$(BIN)/python launch.py --config templates/local.yml

test: tools-test $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-slow: tools-test $(INSTALLED) ## run the tests that take longer
	$(BIN)/python -m pytest -m slow $(WORKERS) $(ARGS)

soak: tools-test $(INSTALLED) ## random runs with faults on namespaced hosts, for MINUTES=10 (docs/operating.md)
	$(BIN)/python tests/cluster/soak.py --minutes $(MINUTES) $(if $(SCENARIO),--scenario $(SCENARIO),--seed $(SEED)) $(ARGS)

docs: $(INSTALLED) ## build the documentation as a site, in site/ (to read with search: .venv/bin/mkdocs serve)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: $(INSTALLED) docs ## ruff, mypy, generated documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python -c 'from launcher.config.reference import config_page; print(config_page(), end="")' | diff docs/config.md - || \
	  { echo "docs/config.md is not up to date: $(BIN)/python -m launcher.config.reference"; exit 1; }
	@$(BIN)/python -c 'from launcher.report.explain import troubleshooting_page; print(troubleshooting_page(), end="")' | \
	  diff docs/troubleshooting.md - || \
	  { echo "docs/troubleshooting.md is not up to date: $(BIN)/python -m launcher.report.explain"; exit 1; }

dist: $(BIN)/python ## build and check the sdist and the wheel, in dist/
	rm -rf dist build
	$(BIN)/python -m venv build/tools
	build/tools/bin/python -m pip install --quiet $(PIP_ARGS) build twine
	build/tools/bin/python -m build --outdir dist .
	build/tools/bin/python -m twine check --strict dist/*

size: $(INSTALLED) ## files, lines, public names, functions and import circles of each package
	@$(BIN)/python tests/code_size.py $(ARGS)

bench: tools-test $(INSTALLED) ## run the benchmarks
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: $(INSTALLED) ## compare with DGL, graphlearn-torch and torch_geometric (installs them, 10 GB; docs/benchmarks.md)
	$(BIN)/python benchmarks/bench_peers.py $(ARGS)

clean: ## remove the virtual environment and caches; runs and parts stay
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# sshd, network tools, sshfs and Slurm serve the tests on namespaced hosts, which only root can make.
tools-demo:
	@sh .ci/need tmux:tmux

tools-test:
	@sh .ci/need tmux:tmux $$([ "$$(id -u)" != 0 ] || echo $(HOST_TOOLS)) || echo "Tests that need these are skipped."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is too old or missing: gnnfleet needs Python 3.10 or newer (make PYTHON=python3.12 …)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || sh .ci/need no-ensurepip:$(notdir $(PYTHON))-venv
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt $(PIP_ARGS) -e '.[test]'
	@touch $@
