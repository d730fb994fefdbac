# Everything a contributor runs; `make help` lists it. The first run makes the environment in .venv from
# pyproject.toml and the exact versions in constraints.txt; later runs reuse it until one of them changes.

# The Python that makes the environment: 3.11 or newer.
PYTHON ?= python3
# Processes that share the tests. Emulated devices run many threads each, so: few.
WORKERS ?= 3
# The tests of a file stay in one process, mostly: what they prepare is prepared once.
SHARED = -n $(WORKERS) --dist worksteal
# More arguments for the program behind demo, test, bench, peers or oracle: make demo ARGS="--replicas 4"
ARGS ?=
# What `make matrix` runs the tests on: Pythons as versions, commands or paths, and which JAX (all that it knows).
PYTHONS ?= 3.11 3.12 3.13
JAX ?=
# The releases that `make keras` tests: the latest of each of the three latest series.
KERAS ?= 3.13.2 3.14.1 3.15.1
# Which faults `make chaos` makes: another number, another list.
SEED ?= 0

BIN := .venv/bin
READY := .venv/.ready
# TensorFlow, which only the oracle needs, stays out of the development environment.
ORACLE := .venv-oracle/bin
ORACLE_READY := .venv-oracle/.ready
# So do the libraries beside which Replicax is measured,
PEERS := .venv-peers/bin
PEERS_READY := .venv-peers/.ready
# XLA's compiler for GPUs,
GPU := .venv-gpu/bin
GPU_READY := .venv-gpu/.ready
# those whose datasets are taken,
INTEGRATIONS := .venv-integrations/bin
INTEGRATIONS_READY := .venv-integrations/.ready
# those that track runs,
TRACKERS := .venv-trackers/bin
TRACKERS_READY := .venv-trackers/.ready
# and what makes the site.
DOCS := .venv-docs/bin
DOCS_READY := .venv-docs/.ready

# `replicax migrate`, a distribution of its own.
MIGRATE := packages/replicax-migrate
# What a new JAX breaks first is seen first.
PRIMITIVES := tests/_jax/test_primitive_table.py

# The lock holds for what is installed and, by one name or the other as pip's version has it, for what
# builds it.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test soak lint primitives bench peers gpu oracle integrations keras trackers matrix chaos docs dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile

demo: $(READY)  ## train on real digits with 8 emulated replicas; pictures go to out/
	$(BIN)/replicax demo $(ARGS)

test: lint primitives $(GPU_READY)  ## run every check: lint, then the tests and the examples in docstrings
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(SHARED) --ignore=$(PRIMITIVES) --ignore=tests/gpu $(ARGS)
	$(if $(ARGS),,JAX_PLATFORMS=cpu $(GPU)/python -m pytest $(SHARED) tests/gpu)

soak: lint primitives  ## run every check, and those tests that are exhaustive rather than necessary
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(SHARED) -m "" --hypothesis-profile=soak --ignore=$(PRIMITIVES) $(ARGS)

lint: $(READY)  ## style, formatting, types, and which package may import which
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

primitives: $(READY)  ## compare what the passes know of JAX's primitives with the JAX that is installed
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PRIMITIVES)

bench: $(READY)  ## measure Replicax against hand-written JAX
	$(BIN)/python benchmarks/overhead.py $(ARGS)

peers: $(PEERS_READY)  ## measure Replicax beside TensorFlow, Keras, Flax NNX and PyTorch
	$(PEERS)/python -m benchmarks.peers $(ARGS)

gpu: $(GPU_READY)  ## compile every program of the tests for GPUs that are not there, beside a table of their collectives
	JAX_PLATFORMS=cpu $(GPU)/python -m pytest $(SHARED) -m "" tests/gpu $(ARGS)

oracle: $(ORACLE_READY)  ## run programs on the real tf.distribute beside Replicax, and compare
	$(ORACLE)/python -m tests.oracle $(ARGS)

integrations: $(INTEGRATIONS_READY)  ## test datasets of TensorFlow, PyTorch and Hugging Face, models of Keras, weights of transformers
	JAX_PLATFORMS=cpu $(INTEGRATIONS)/python -m pytest tests/integration tests/newcomers/test_newcomers.py::test_keras $(ARGS)

keras: $(INTEGRATIONS_READY)  ## test models of Keras with its three latest series: KERAS="3.13.2 …"
	for version in $(KERAS); do \
	    test -d .venv-keras/$$version/keras || $(INTEGRATIONS)/python -m pip install --quiet --no-deps \
	        --target .venv-keras/$$version keras==$$version || exit 1; \
	    PYTHONPATH=.venv-keras/$$version JAX_PLATFORMS=cpu \
	        $(INTEGRATIONS)/python -m pytest tests/integration/keras_models $(ARGS) || exit 1; \
	done

trackers: $(TRACKERS_READY)  ## test the logs of runs with Weights & Biases and MLflow, offline
	JAX_PLATFORMS=cpu $(TRACKERS)/python -m pytest tests/integration/test_trackers.py $(ARGS)

matrix:  ## run the tests with each JAX on each Python, in environments of their own
	$(PYTHON) tests/matrix/run.py --pythons "$(PYTHONS)" $(if $(JAX),--jax "$(JAX)") $(SHARED) $(ARGS)

chaos: $(READY)  ## kill, stop and preempt workers of a run, damage its checkpoints, fill its disk: SEED=…
	$(BIN)/python -m tests.chaos --seed $(SEED) $(ARGS) $(if $(ARGS),,&& $(BIN)/python -m tests.chaos.servers --seed $(SEED))

docs: $(DOCS_READY)  ## run the code of every page, then build the site in build/site
	KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(DOCS)/python -m pytest $(SHARED) -m "" tests/test_documents.py
	$(DOCS)/python docs/site/build.py $(ARGS)

dist:  ## build the wheel and the sdist in dist/, and try them in empty environments
	$(PYTHON) tests/matrix/dist.py --pythons "$(PYTHONS)" $(if $(JAX),--jax "$(JAX)") $(ARGS)

clean:  ## remove the environments, caches and outputs
	rm -rf .venv .venv-oracle .venv-peers .venv-gpu .venv-integrations .venv-trackers .venv-keras .venv-matrix .venv-docs .venv-dist
	rm -rf build dist out
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last: an installation that broke off is tried again by the next make.
$(READY): pyproject.toml $(MIGRATE)/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --editable '.[dev]' --editable $(MIGRATE)
	touch $@

$(ORACLE_READY): pyproject.toml constraints.txt tests/oracle/constraints.txt
	$(PYTHON) -m venv .venv-oracle
	PIP_CONSTRAINT="constraints.txt tests/oracle/constraints.txt" \
	    $(ORACLE)/python -m pip install --editable '.[ray]' tensorflow-cpu
	touch $@

$(INTEGRATIONS_READY): pyproject.toml constraints.txt tests/integration/constraints.txt
	$(PYTHON) -m venv .venv-integrations
	PIP_CONSTRAINT="constraints.txt tests/integration/constraints.txt" \
	    $(INTEGRATIONS)/python -m pip install --editable '.[datasets,demo,nnx,parquet,ray,safetensors,torch]' \
	    pytest hypothesis tensorflow-cpu tensorboard keras transformers
	touch $@

$(TRACKERS_READY): pyproject.toml constraints.txt tests/integration/constraints-trackers.txt
	$(PYTHON) -m venv .venv-trackers
	PIP_CONSTRAINT="constraints.txt tests/integration/constraints-trackers.txt" \
	    $(TRACKERS)/python -m pip install --editable '.[wandb]' mlflow-skinny sqlalchemy alembic pytest hypothesis
	touch $@

$(PEERS_READY): pyproject.toml constraints.txt benchmarks/peers/constraints.txt
	$(PYTHON) -m venv .venv-peers
	PIP_CONSTRAINT="constraints.txt benchmarks/peers/constraints.txt" \
	    $(PEERS)/python -m pip install --editable '.[nnx,pictures,torch]' keras tensorflow-cpu
	touch $@

# The development environment, and the compiler beside it, where no other test sees it.
$(GPU_READY): $(READY) tests/gpu/constraints.txt
	$(PYTHON) -m venv .venv-gpu
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	    > $$($(GPU)/python -c 'import site; print(site.getsitepackages()[0])')/development.pth
	PIP_CONSTRAINT="constraints.txt tests/gpu/constraints.txt" \
	    $(GPU)/python -m pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt keras h5py namex optree
	touch $@

$(DOCS_READY): pyproject.toml $(MIGRATE)/pyproject.toml constraints.txt docs/site/constraints.txt
	$(PYTHON) -m venv .venv-docs
	PIP_CONSTRAINT="constraints.txt docs/site/constraints.txt" $(DOCS)/python -m pip install --editable '.[dev]' \
	    --editable $(MIGRATE) keras myst-parser sphinx sphinx-book-theme sphinx-copybutton sphinx-design
	touch $@
