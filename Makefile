# Needs Python 3.11 or newer and make; everything else goes into .venv, at the versions in constraints/.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
DEMO := .venv/.demo
VENV := .venv/.installed
SERVERS := .venv/mcp-servers/.installed
FUZZ := .venv/.fuzz
COMPILE := $(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --generate-hashes --python-version 3.11

# Tests start many processes. Each would compile the package again if none of them could write bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test adapters check lint types layers docs servers compiled bench faults fuzz lock clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO)  ## Watch an agent with a scripted model, and what it costs with and without Coatcheck (no network)
	$(BIN)/python -m examples.demo $(ARGS)

# Three workers for two cores, since tests often wait for a process, a server or a disk.
test: $(VENV) $(SERVERS)  ## Run the tests, with the short form of the faults (ARGS="-k session" for some)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

adapters: $(VENV)  ## Run the tests of the adapters, each with its framework (ARGS=langchain for one)
	$(BIN)/python -m tests.adapters $(ARGS)

check: types lint layers docs  ## Lint, formatting, types, layers and the links of the documentation

lint: $(VENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)
	$(BIN)/mypy

layers: $(VENV)
	$(BIN)/lint-imports

docs: $(VENV)  ## Build the documentation into site/, for reading without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

servers: $(SERVERS)

# Imports every test and runs one property test, so that the workers of `make test` do not all compile the same modules and
# make the same tables of hypothesis at the same time.
compiled: $(VENV)
	@$(BIN)/python -m pytest -qq -k test_masking_never_fails_and_masking_again_changes_nothing >/dev/null 2>&1 || true

bench: $(VENV) $(SERVERS)  ## Measure ours against the floor and against peers, in one run on the same disk
	$(BIN)/python -m benchmarks $(ARGS)

faults: $(FUZZ)  ## Run the long form of the faults (crashes, full disks, damage, races), of property tests and of repetitions
	COATCHECK_FAULTS=long $(BIN)/python -m pytest -m "faults or properties or repeated" --timeout 7200 -n 3 --dist worksteal $(ARGS)

fuzz: $(FUZZ)  ## Fuzz every reader of untrusted bytes for an hour (ARGS="journal wire --seconds 60" for some)
	$(BIN)/python -m tests.fuzz $(ARGS)

lock: $(VENV)  ## Write the constraints files (ARGS=--upgrade for newer versions)
	$(COMPILE) --group dev pyproject.toml -o constraints/main.txt $(ARGS)
	$(COMPILE) --group demo pyproject.toml -c constraints/main.txt -o constraints/demo.txt $(ARGS)
	$(COMPILE) --group fuzz --no-deps -o constraints/fuzz.txt $(ARGS)
	$(COMPILE) benchmarks/peers/wanted.txt --override benchmarks/peers/overrides.txt -o constraints/peers.txt $(ARGS)

clean:  ## Remove .venv, builds and caches
	rm -rf .venv .venv-adapters .venv-peers .fuzz build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# MCP servers from npm, for the tests of the proxy, and a browser. Without a registry those tests skip, but never in CI.
$(SERVERS): $(VENV) tests/mcp/node/package-lock.json tests/gateway/node/package-lock.json
	@$(BIN)/python -m tests.gateway.node_clients || { echo "the clients from npm cannot be installed" >&2; test -z "$$CI"; }
	@$(BIN)/python -m tests.browser || { echo "Chromium cannot be installed" >&2; test -z "$$CI"; }
	@$(BIN)/python -m tests.mcp.node_servers || { echo "the servers from npm cannot be installed" >&2; test -z "$$CI"; }

# What the demo uses, about 220 MB.
$(DEMO): constraints/demo.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "coatcheck needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making .venv with the $$(grep -c == constraints/demo.txt) packages that the demo uses (about 220 MB, once) …"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r constraints/demo.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# What the tests, the benchmarks and the linters use on top of that. uv installs it in a tenth of the time, but does not read
# the settings of pip, which may name another index: then pip does it.
$(VENV): $(DEMO) constraints/main.txt
	@echo "Adding the packages for tests, benchmarks and linting to .venv (about 1 GB, once) …"
	@sed -n '/^uv==/,/[^\\]$$/p' constraints/main.txt > .venv/uv.txt
	-$(BIN)/python -m pip install --quiet --require-hashes -r .venv/uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r constraints/main.txt 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --require-hashes -r constraints/main.txt
	@touch $@

# The fuzzer. Where it cannot be installed, its tests skip, but never in CI.
$(FUZZ): $(VENV) constraints/fuzz.txt
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r constraints/fuzz.txt || \
		{ echo "atheris cannot be installed" >&2; test -z "$$CI"; }
	@touch $@
