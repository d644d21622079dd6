# make demo, make test: each sets up .venv by itself, once, and again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv/.peers

.PHONY: setup demo test test-all mutants bench peers lint format coverage clean page page-packages maps release

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Lockstep needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The tools that the benchmarks compare with, W&B and MLflow: about 250 MB, for `make bench` and the slow tests alone.
peers: $(PEERS)

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,wandb,mlflow]'
	@touch $@

demo: $(READY)
	@$(BIN)/lockstep train

# Two at a time: much of a test's time is that of processes that start and wait. A file's tests stay together, they share ranks.
AT_ONCE = -n 2 --dist loadfile

# In the order of the folders, which ends with the shortest files: else those with few and long tests come last. Without
# GPUs: what tests them is marked gpu, and beside one that torch sees even CPU gradients keep a process from being forked.
test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(AT_ONCE) --no-loadscope-reorder -m "not slow and not gpu"

test-all: $(PEERS)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(AT_ONCE) -m "not gpu"

# Plants faults one by one in a copy of the repository and says which of them no test sees.
mutants: $(READY)
	$(BIN)/python -m tests.mutants

bench: $(PEERS)
	$(BIN)/python benchmarks/overhead.py

# The page's script and style, bundled; they are committed, so that only who changes them needs npm.
FRONT := src/lockstep/page/front
PACKAGES := $(FRONT)/node_modules/.package-lock.json

page: $(PACKAGES)
	npm run --silent build --prefix $(FRONT)

page-packages: $(PACKAGES)

$(PACKAGES): $(FRONT)/package.json $(FRONT)/package-lock.json
	npm ci --silent --no-audit --no-fund --prefix $(FRONT)
	@touch $@

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@if [ -d $(FRONT)/node_modules/eslint ]; then npm run --silent check --prefix $(FRONT); \
	else echo "the page's script is not looked at: make page-packages installs what does"; fi

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The drawing and the tables of docs/architecture.md, from the table of layers and the modules' docstrings.
maps:
	$(PYTHON) docs/make_architecture.py

# Builds, tries and tags the version on top of CHANGELOG.md; DRY=1: all but the tag.
release: $(READY)
	DRY=$(DRY) .ci/release

coverage: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m "not slow and not gpu" --cov --cov-report=term:skip-covered

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .coverage* htmlcov
