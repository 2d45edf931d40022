# make run    sets up .venv, then runs the demo: learns a wiring, compares it with fixed ones, and prunes it
# make test   sets up .venv, then runs lint, type checks and tests
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: help run test test-docs test-integrations test-slow docs docs-serve venv browser format clean

help:
	@echo "make run                set up, then run the demo: learn a wiring, compare it with fixed ones, prune it"
	@echo "make test               set up, then run lint, type checks and tests (about 7 minutes on two cores)"
	@echo "make test-docs          check that the tables of the docs match the kept results"
	@echo "make test-integrations  install timm, transformers, lightning and accelerate, and run the tests with them"
	@echo "make test-slow          run the tests that take minutes, or install into new environments"
	@echo "make docs               build the documentation site into build/site"
	@echo "make docs-serve         serve the site on this machine, and rebuild it when a page changes"
	@echo "make venv               only create .venv, with every extra"
	@echo "make format             format the code, and fix what the linter can fix"
	@echo "make clean              remove .venv and caches"

run: venv
	@$(BIN)/maskconnect demo

test: venv browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m pytest -m "not slow and not docs and not integrations" -n auto --maxprocesses 4 --dist loadfile

test-docs: venv
	$(BIN)/python -m pytest -m docs

test-integrations: .venv/.integrations
	$(BIN)/python -m pytest -m integrations tests/integrations -n auto --maxprocesses 4 --dist loadfile

test-slow: venv
	@$(BIN)/python tools/get_packages.py slurm
	$(BIN)/python -m pytest -m slow

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet, with which warnings do not fail
	@! grep -rlF --include='*.html' -e "$(CURDIR)" -e 'src="http' -e 'rel="stylesheet" href="http' build/site \
		|| { echo "these pages name a folder of this machine, or load something from the network"; exit 1; }
	@echo "the documentation is in build/site/index.html"

docs-serve: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Scripts in .venv contain its path, so a checkout that was moved needs a new one.
ifneq ($(wildcard .venv/.made),)
ifneq ($(shell cat .venv/.made),$(CURDIR))
$(shell rm -rf .venv)
endif
endif

venv: .venv/.made

.venv/.made: pyproject.toml constraints.txt tools/make_venv.py
	@$(PYTHON) tools/make_venv.py
	@echo "$(CURDIR)" > $@

.venv/.integrations: .venv/.made
	@echo "setting up .venv: the libraries for integration tests"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[integrations]"
	@touch $@

.venv/.docs: .venv/.made
	@echo "setting up .venv: the tools for the documentation"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

browser: venv
	@$(BIN)/python tools/get_packages.py chromium

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
