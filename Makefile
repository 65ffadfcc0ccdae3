# Common tasks. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
VENV_JAX := .venv-jax
VENV_PEERS := .venv-peers
VENV_BEAM := .venv-beam

# Written when an environment is complete; older than its requirements, it is brought up to date.
TF := $(VENV)/.installed
JAX := $(VENV_JAX)/.installed
PEERS := $(VENV_PEERS)/.installed
BEAM := $(VENV_BEAM)/.installed
WEB := .venv-web/.installed

# That of the backend which KERAS_BACKEND names.
ACTIVE := $(if $(filter jax,$(KERAS_BACKEND)),$(VENV_JAX),$(VENV))

# The environments are installed without bytecode. Each module's is written when it is first imported,
# even where that is switched off: else every process would compile TensorFlow and Keras anew.
export PYTHONDONTWRITEBYTECODE =

# Two test processes with one computing thread each, so that they do not fight for the cores.
QUIET := TF_CPP_MIN_LOG_LEVEL=2 MPLBACKEND=Agg
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 NPROC=1
PARALLEL := -n 2 --dist worksteal
# Tests compile much and compute little: do not optimise, and share what is compiled.
UNOPTIMISED := XLA_FLAGS=--xla_backend_optimization_level=0
UNOPTIMISED_JAX := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
SHARED := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(VENV_JAX)/compiled \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Several processes on one GPU: none takes all of its memory.
SHARE_GPU := TF_FORCE_GPU_ALLOW_GROWTH=true XLA_PYTHON_CLIENT_PREALLOCATE=false

.PHONY: help venv venv-jax beam gpu train reproduce test coverage test-jax test-gpu test-slow test-versions test-beam robustness bench peers lint format web docs notebooks wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(TF) ## Make or update .venv (TensorFlow)

venv-jax: $(JAX) ## Make or update .venv-jax (JAX, without TensorFlow)

beam: $(BEAM) ## Make or update .venv-beam, for scripts/score.py

gpu: $(ACTIVE)/.installed ## Add CUDA for an NVIDIA GPU; KERAS_BACKEND=jax to .venv-jax
	$(ACTIVE)/bin/python -m pip install $(if $(filter jax,$(KERAS_BACKEND)),\
		"jax[cuda13]" -c requirements-jax.txt,"tensorflow[and-cuda]" -c requirements.txt)

train: $(TF) ## Train the small example; options in ARGS="..."
	$(VENV)/bin/python scripts/train_digits.py $(ARGS)

reproduce: $(TF) ## Repeat the experiments; ARGS="lenet --seeds 0 1 2"
	$(VENV)/bin/python scripts/reproduce.py $(or $(ARGS),all)

test: $(TF) ## Test on TensorFlow
	KERAS_BACKEND=tensorflow $(QUIET) $(ONE_THREAD) $(UNOPTIMISED) $(VENV)/bin/python -m pytest \
		$(PARALLEL) $(ARGS)

coverage: $(TF) ## The same, and which lines it reaches (a third slower)
	$(MAKE) test ARGS="--cov --cov-fail-under=90 $(ARGS)"

test-jax: $(JAX) ## Test on JAX, but for what need not be shown twice
	KERAS_BACKEND=jax $(QUIET) $(ONE_THREAD) $(UNOPTIMISED_JAX) $(SHARED) $(VENV_JAX)/bin/python -m pytest \
		tests $(PARALLEL) -m "not slow and not smoke and not install and not once" $(ARGS)

test-gpu: $(ACTIVE)/.installed ## Test on a GPU what depends on one; KERAS_BACKEND=jax for JAX
	$(QUIET) $(SHARE_GPU) $(ACTIVE)/bin/python -m pytest tests --gpu -n $(or $(JOBS),4) \
		--dist worksteal $(ARGS) \
		-m "not slow and not smoke and not install$(if $(filter jax,$(KERAS_BACKEND)), and not once)"

test-slow: $(TF) $(JAX) ## Run the long trainings, on both backends
	KERAS_BACKEND=tensorflow $(QUIET) $(VENV)/bin/python -m pytest -m slow $(ARGS)
	KERAS_BACKEND=jax $(QUIET) $(VENV_JAX)/bin/python -m pytest -m "slow and not once and not install" $(ARGS)

test-versions: ## Try old and new versions of Keras and the backends, an hour; ARGS="keras-3.12"
	$(QUIET) $(ONE_THREAD) $(UNOPTIMISED) $(PYTHON) scripts/versions.py $(ARGS)

test-beam: $(TF) $(BEAM) ## Test scripts/score.py, three minutes
	KERAS_BACKEND=tensorflow $(QUIET) $(VENV)/bin/python -m pytest tests/scripts/test_score.py $(ARGS)

robustness: $(TF) ## Try hostile and broken input, ten minutes; ARGS="--scale 0.1"
	$(VENV)/bin/python scripts/robustness.py $(ARGS)

bench: $(ACTIVE)/.installed ## Time what the noise costs, up to an hour; ARGS="--short"
	$(ACTIVE)/bin/python scripts/benchmark.py $(ARGS)

peers: $(TF) $(PEERS) ## Time steps of random weights beside other libraries', eight minutes
	$(VENV)/bin/python scripts/benchmark.py --only weights --store $(ARGS)

lint: $(TF) ## Check style and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(TF) ## Fix what can be fixed, then format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

web: $(WEB) ## Fetch onnxruntime-web for the page docs/try.md; needs npm

docs: $(TF) $(if $(shell command -v npm),$(WEB)) ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)

notebooks: $(TF) ## Execute the notebooks, keeping their figures
	$(ONE_THREAD) $(VENV)/bin/python scripts/run_notebooks.py $(ARGS)

wheel: $(TF) ## Build the wheel into dist/
	$(VENV)/bin/python -m build --wheel --no-isolation

clean: ## Remove build products and caches; the environments and outputs/ stay
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,ENVIRONMENT,REQUIREMENTS,BACKEND). The import writes the bytecode that all need, once.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and \
		"Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v)'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-compile -r $(2)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	KERAS_BACKEND=$(3) $(QUIET) $(1)/bin/python -c 'import tfp_ibnn.plots'
	touch $@
endef

$(TF): requirements.txt pyproject.toml
	$(call install,$(VENV),requirements.txt,tensorflow)

$(JAX): requirements-jax.txt pyproject.toml
	$(call install,$(VENV_JAX),requirements-jax.txt,jax)

# Without this package: the other libraries alone.
$(PEERS): requirements-peers.txt
	test -x $(VENV_PEERS)/bin/python || $(PYTHON) -m venv $(VENV_PEERS)
	$(VENV_PEERS)/bin/python -m pip install --quiet --no-compile -r requirements-peers.txt
	touch $@

# Without this package: exported files need none of it.
$(BEAM): requirements-beam.txt
	test -x $(VENV_BEAM)/bin/python || $(PYTHON) -m venv $(VENV_BEAM)
	$(VENV_BEAM)/bin/python -m pip install --quiet --no-compile -r requirements-beam.txt
	touch $@

$(WEB): docs/try/package.json
	mkdir -p $(@D)
	cp $< $(@D)/
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --silent
	touch $@
