# `make serve` and `make test` are all that a newcomer needs; `make help` lists the rest.
PYTHON ?= python3
# Where pip gets torch from: empty for the package index; give the URL of an index of CPU or CUDA builds to choose one.
TORCH_INDEX ?=
TORCH = torch==2.13.0
BIN = .venv/bin
PIP = $(BIN)/pip --disable-pip-version-check -q

.PHONY: help serve test lint format types bench docs image-test clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.venv/serve: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attend needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once; a minute or two)"
	@$(PIP) install $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

.venv/dev: .venv/serve requirements-dev.lock
	@$(PIP) install -r requirements-dev.lock
	@touch $@

serve: .venv/serve ## start the service on 127.0.0.1:8000 (ATTEND_PORT=9000 make serve for another port)
	@exec $(BIN)/attend serve

test: .venv/dev ## run the tests (FAST=1 leaves out the slow ones; ARGS="-k word" chooses)
	$(BIN)/python -m pytest $(if $(FAST),-m "not slow") $(ARGS)

lint: .venv/dev ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: .venv/dev ## format the code and mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev ## check the types
	$(BIN)/mypy

bench: .venv/dev ## measure against other servers (BENCH="--quick" for a short run)
	$(BIN)/python -m bench $(BENCH)

docs: .venv/dev ## write the generated parts of the documentation again
	$(BIN)/python -m docs.generate --write

image-test: .venv/dev ## build the image and try it with a real Docker engine
	$(BIN)/python -m tests.image

clean: ## remove the environment and what tools left behind
	rm -rf .venv .bench .pytest_cache .mypy_cache .ruff_cache build *.egg-info
