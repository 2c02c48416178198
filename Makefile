# `make report` measures and builds the book, `make test` checks everything; both install first what is missing.

VENV := .venv
BIN := $(VENV)/bin
UV := 0.13.9
PROFILE ?= cpu
PORT ?= 8000
SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))

PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	if $$python -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$python; break; fi; done)

# A Python path of the user's shell would mix other packages in.
unexport PYTHONPATH PYTHONHOME
export OMP_NUM_THREADS ?= 1
export UV_HTTP_TIMEOUT ?= 600

.DEFAULT_GOAL := help
.PHONY: help install install-slurm report test test-pages test-cluster lint serve archive clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

# The last line alone makes the installation count as done, so that a killed one starts again.
$(VENV)/.installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; python3 is $$(python3 --version 2>&1)." \
		"Name another one with 'make PYTHON=/path/to/python3.11 report'." >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
		"Python 3.11 or 3.12 is needed." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments;" \
		"on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@rm -f $@
	@if ! $(BIN)/uv --version 2>/dev/null | grep -q '^uv $(UV)\b' || ! $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null; then \
		echo "making $(VENV)"; \
		same=$$($(BIN)/python --version 2>/dev/null); \
		if [ "$$same" = "$$($(PYTHON) --version)" ]; then clear=; else clear=--clear; fi; \
		$(PYTHON) -m venv $$clear $(VENV) && \
		PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 $(BIN)/python -m pip install --quiet uv==$(UV); fi
	@echo "installing the packages of requirements.lock"
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/.installed ## make the virtual environment from requirements.lock

install-slurm: install ## what sends the jobs to a Slurm cluster
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint requirements.lock -r pyproject.toml --extra slurm

report: install ## run what has changed and build the book (PROFILE=cpu)
	@$(BIN)/qsa report --profile $(PROFILE)

lint: install ## formatting, lint, types and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint, then all tests
	$(BIN)/pytest -n 2

test-pages: install ## open every page of the built book in Chromium, without a network; build it again and compare
	QSA_REBUILD=1 $(BIN)/pytest -q -rs tests/report/test_browser.py tests/report/test_built_book.py

test-cluster: install-slurm ## through sbatch of a Slurm that it starts on this machine
	tests/cluster/run

serve: ## show the built book on http://127.0.0.1:8000 (PORT=8000)
	@test -f _build/html/index.html || { echo "error: no book yet; run 'make report'" >&2; exit 1; }
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

archive: install ## one zip of the built book with SHA-256 checksums: _build/qsa-kernels-book.zip
	@$(BIN)/qsa archive

clean: ## remove runs, pages and the built book; recorded runs in data/runs stay
	rm -rf _build runs book/results .snakemake
