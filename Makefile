# `make serve` starts a server with a page, `make demo` answers a question about a long document, `make test` proves the
# library.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
MODEL := checkpoints/smollm2-135m-instruct
WORKERS ?= 2
export JAX_PLATFORMS ?= cpu
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo serve setup test test-all test-quick test-slow test-real docs aot aot-tools gpu mutate check clean

demo: $(BIN)/.demo
	@$(BIN)/python checkpoints/fetch_smollm2.py
	@mkdir -p .cache
	@$(BIN)/python tools/demo_text.py > .cache/demo.txt
	@$(BIN)/python tools/demo_text.py --question > .cache/demo-prompt.txt
	@echo "A harbor's diary of about 2,000 tokens with one planted fact, then: $$(tail -n 1 .cache/demo-prompt.txt)"
	@$(BIN)/jshadow generate $(MODEL) --prompt-file .cache/demo-prompt.txt --chat --policy shadowkv --set rank=32 \
	    --set budget=256 --fetch device_put --baseline full --max-new-tokens 32 --dtype float32 --expect 4719362
	@echo "Next:"
	@echo "  make serve"
	@echo "  $(BIN)/jshadow chat $(MODEL) --file .cache/demo.txt --dtype float32 --max-new-tokens 64"
	@echo "  $(BIN)/jshadow policies shadowkv"
	@echo "  $(BIN)/jshadow plan llama-3.1-8b --context 122880 --gpu h200"

# A server with the small model and a page: http://127.0.0.1:8000. Its documents lie in .cache/documents.
SERVE_OPTIONS ?=
serve: $(BIN)/.serve
	@$(BIN)/python checkpoints/fetch_smollm2.py
	@mkdir -p .cache
	@$(BIN)/python tools/demo_text.py > .cache/demo.txt
	@$(BIN)/jshadow serve $(MODEL) --library .cache/documents --max-context 4096 --room 1024 --slots 4 --policy shadowkv \
	    --set preset=packed --dtype float32 $(SERVE_OPTIONS)

setup: $(BIN)/.setup

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# Minutes: every policy and family, on some of the cases. More than TESTS_LIMIT compiled programs are a failure.
test: check
	$(MAKE) test-quick

test-quick: $(BIN)/.setup
	TESTS_LIMIT=2000 $(PYTEST)

# Everything. `make test-slow ROOMS="tests/laws tests/kernels"` runs a part.
# The quick tests, the other tests on tiny models, and those on a real model.
test-all:
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-real

test-slow: $(BIN)/.setup
	$(PYTEST) -m "slow and not real" $(ROOMS)

test-real: $(BIN)/.setup
	$(BIN)/python checkpoints/fetch_smollm2.py
	$(if $(shell command -v npm),npm install --silent --no-fund --no-audit --prefix .cache/node openai@7 || true)
	$(PYTEST) -m real --timeout=2400 $(ROOMS)

# The documentation as a site of static pages: build/site/index.html. A warning is an error.
docs: $(BIN)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The GPU compiler and NVIDIA's assembler, beside the environment and not in it: no driver, no CUDA libraries.
AOT := $(VENV)/aot
AOT_OPTIONS ?=
aot: $(BIN)/.setup $(AOT)/.done
	PYTHONPATH=$(AOT):tools:tests/support $(BIN)/python -m aot --jobs $(WORKERS) $(AOT_OPTIONS)

aot-tools: $(AOT)/.done

$(AOT)/.done: constraints.txt | $(BIN)/.setup
	pjrt=$$($(BIN)/python -c "import jax; print(f'jax-cuda13-pjrt=={jax.__version__}')"); \
	    $(BIN)/python -m pip install -q -c constraints.txt --no-deps --upgrade --target $(AOT) $$pjrt \
	    nvidia-cuda-nvcc nvidia-cuda-nvdisasm
	@touch $@

# Unattended on a machine with an NVIDIA GPU, by its own Python and JAX: no network, nothing is installed. Three parts of
# less than nine minutes each, or one: `make gpu PART=checks`, `PART=decode`, `PART=layers`.
GPU_PYTHON ?= python3
GPU_OPTIONS ?=
PART ?=
gpu:
	env -u JAX_PLATFORMS -u JAX_COMPILATION_CACHE_DIR PYTHONPATH=.:tools:tests/support$${PYTHONPATH:+:$$PYTHONPATH} \
	    $(GPU_PYTHON) -m gpu $(if $(PART),--part $(PART)) $(GPU_OPTIONS)

# 80 seeded mutations of the library, each against the tests of its room: hours. docs/benchmarks/tests.md has the result.
MUTATE_OPTIONS ?=
mutate: $(BIN)/.setup
	PYTHONPATH=tools $(BIN)/python -m mutate run $(MUTATE_OPTIONS)

check: $(BIN)/.setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Finds a Python that is new enough, or says in one line what to install.
$(BIN)/python:
	python=$$(sh tools/find_python.sh "$(PYTHON)") && "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# An environment of an older checkout can have an older Python.
FOUND = sh tools/find_python.sh $(BIN)/python >/dev/null || { echo "Run make clean." >&2; exit 1; }

$(BIN)/.setup: pyproject.toml constraints.txt | $(BIN)/python
	@$(FOUND)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $(BIN)/.setup $(BIN)/.demo $(BIN)/.serve

$(BIN)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@$(FOUND)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[gguf]"
	@touch $@

$(BIN)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@$(FOUND)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[gguf,serve]"
	@touch $@

$(BIN)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) .cache build/site .mypy_cache .pytest_cache .ruff_cache .hypothesis

include tests/references/references.mk
