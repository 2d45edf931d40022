# make run    sets up, then learns a wiring of unlike branches beside fixed ones, and prunes it
# make test   sets up, then runs every test, lint and types
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: help run test test-docs test-integrations test-slow venv browser format clean

help:
	@echo "make run                set up, then learn a wiring of unlike branches beside fixed ones, and prune it"
	@echo "make test               set up, then lint, types and tests (about 7 minutes on two cores)"
	@echo "make test-docs          check that every table in the docs is what the kept results say"
	@echo "make test-integrations  tests with the real timm, transformers, lightning and accelerate, which it installs"
	@echo "make test-slow          the tests that need minutes, or install into fresh environments"
	@echo "make venv               only make .venv, with every extra"
	@echo "make format             write the code as the linter wants it"
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

# Scripts in .venv hold its path: a checkout that was moved needs a new one.
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
	@echo "setting up .venv: the libraries of the integrations"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[integrations]"
	@touch $@

browser: venv
	@$(BIN)/python tools/get_packages.py chromium

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
