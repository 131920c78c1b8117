# The front door. Everything below builds what it needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest

.PHONY: venv test demo e2e vnode check bench format clean

venv: .venv/.ready

.venv/.ready: pyproject.toml agent/core/_bitmap.c agent/core/_search.c agent/core/_bits.h
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

test: venv  ## the whole suite
	$(PYTEST)

demo: venv  ## the agent on an embedded node of 8 GPUs; no root, no cluster, no GPU
	$(BIN)/numalet demo

e2e: venv  ## against a real kubelet and containerd; needs root, builds both with Go
	hack/e2e/build
	$(BIN)/pytest --durations=0 --durations-min=1 tests/e2e

vnode: venv  ## the same on emulated nodes with 8 GPUs on several NUMA nodes; needs root and QEMU
	hack/e2e/build
	hack/vnode/build
	$(BIN)/python -m tests.vnode

check: venv  ## all that must hold before a change lands
	hack/check

bench: venv  ## speed and memory, printed
	hack/bench
	$(BIN)/python -m tests.bench.running_agent
	$(BIN)/pytest --benchmark-enable --benchmark-only --benchmark-columns=min,median,ops --benchmark-group-by=group tests/bench

format: venv
	$(BIN)/ruff format agent tests
	$(BIN)/ruff check --fix agent tests

clean:
	rm -rf .venv build .cache .coverage* .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info agent/core/*.so
