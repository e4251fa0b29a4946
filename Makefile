# Each target does its own set-up: a virtual environment, the package, and Horovod, built once.
# Set-up runs again only when the dependencies change.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: demo test check venv clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: check
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(STAMP)

# constraints.txt keeps pip from choosing a torch with gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/lightning-dsgd install-horovod
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
