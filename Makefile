# Two commands matter: `make demo` and `make test`. Each makes .venv first when it is not there.

PYTHON ?= python3
# OpenMP threads that spin while they wait make everything slower as soon as two processes share the cores.
export OMP_WAIT_POLICY ?= PASSIVE
# Processes that run tests; each takes up to 2 GiB.
WORKERS ?= 2
# `make test TORCH=2.11.0` runs with another torch, in a virtual environment of its own: `.venv-2.11.0`.
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := .venv$(addprefix -,$(filter-out $(PINNED),$(TORCH)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := $(VENV)/constraints.txt
CUDA_TORCH := 2.11.0
CUDA_PYTHON := .venv-$(CUDA_TORCH)/bin/python

.PHONY: venv demo test durations test-slow test-clients races mutants cuda cuda-compile fuzz lint docs docs-blocks pictures format bench clean

venv: $(INSTALLED)

$(CONSTRAINTS): constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

# torch comes first and by its exact version: pip then takes the CPU build where one is at hand, not gigabytes of CUDA.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch==$(TORCH)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[test,hf,report]'
	touch $@

demo: venv
	$(BIN)/elixir-compile demo

# A file stays in one process, so that its fixtures are made once. Files keep the order of `tests/conftest.py`: by
# default xdist starts files of few tests last, and those of several ranks have few tests that take long. One thread of
# torch for each process: with two, which then share a core each, the same tests take a quarter more of both cores.
# Compiled Python is kept even where the environment forbids it: some thirty processes load the package, two all tests.
test: export OMP_NUM_THREADS ?= 1
test: export PYTHONDONTWRITEBYTECODE =
test: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The seconds of each file of tests, by which `tests/conftest.py` sorts the files; for a quiet machine.
durations: export OMP_NUM_THREADS ?= 1
durations: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=0 | awk \
	'$$2 ~ /^(setup|call|teardown)$$/ {split($$3, id, "::"); sum[id[1]] += $$1} END {for (file in sum) printf "%.1f %s\n", \
	sum[file], file}' | sort -rn -o tests/durations.txt

test-slow: venv
	$(BIN)/python -m pytest -q -m slow

# Every order of copies, updates and compute: all combinations of modes and two ranks under many schedules, then all
# training tests with checks, and the tests on a second device type whose copies are late.
SEEDS ?= 50

races: venv
	ELIXIR_RACE_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q -n $(WORKERS) -m 'slow or not slow' tests/run/races
	ELIXIR_CHECK_RACES=tests.races.checked PYTHONPATH=$(CURDIR) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/run
	$(BIN)/python -m tests.device.on_device -m 'slow or not slow'

# Whether the tests of races notice each wait of the runtime that is missing, and where `make cuda` has made its virtual
# environment, whether the clocks of the CUDA stand-in do; `ONLY=gathers.py` runs some of the mutants.
mutants: venv
	$(BIN)/python -m tests.mutants --only "$(ONLY)"
	if [ -x $(CUDA_PYTHON) ]; then $(CUDA_PYTHON) -m tests.mutants --cuda --only "$(ONLY)"; \
	else echo "not run on the CUDA stand-in: no $(CUDA_PYTHON)"; fi

# The genuine CUDA build of torch, without a GPU, over a stand-in for NVIDIA's libraries, then `make cuda-compile`;
# `PARTS="itself gpu"` runs some parts of the former.
cuda:
	$(MAKE) venv TORCH=$(CUDA_TORCH)
	$(CUDA_PYTHON) -m tests.cuda_standin.run $(PARTS)
	$(if $(PARTS),,$(CUDA_PYTHON) -m tests.cuda_compile.compile_all --workers $(WORKERS))

# Steps of four models, compiled by Inductor and Triton for GPUs that are not there: the same torch over a device that does
# nothing.
cuda-compile:
	$(MAKE) venv TORCH=$(CUDA_TORCH)
	$(CUDA_PYTHON) -m tests.cuda_compile.compile_all --workers $(WORKERS)

# Random training runs of `make fuzz`, a few seconds each.
RUNS ?= 200

# Properties, of values that no run before has drawn, and random training runs: their budgets, predictions and bits.
fuzz: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m hypothesis --hypothesis-profile=new
	$(BIN)/python -m tests.run.random_runs --runs $(RUNS)
	$(BIN)/python -m tests.run.random_runs --runs $(RUNS) --others

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# The site of the docs, in build/docs. A warning, as of a link that leads nowhere, is an error.
DOCS_INSTALLED := $(VENV)/.docs-installed

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

docs: $(DOCS_INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

# What the commands in README and docs print today, in two minutes. Blocks of one machine, "console machine", stay.
docs-blocks: venv
	$(BIN)/python -m tests.house.console_blocks README.md docs/quickstart.md docs/checkpoints.md

# Training by other libraries, TRL and Lightning among them, compared with eager training bit for bit: three minutes.
CLIENTS_INSTALLED := $(VENV)/.clients-installed

$(CLIENTS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[clients]'
	touch $@

test-clients: $(CLIENTS_INSTALLED)
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/run/clients

# The pictures of README and docs, of the stored plan that trains GPT-2 124M in 2 GiB of a 24 GB card.
# `elixir-compile plan gpt2-124m --hardware rtx4090-24g --device-memory 2GiB -o docs/img/gpt2-124m.json` makes the plan.
PICTURE = $(BIN)/elixir-compile report docs/img/gpt2-124m.json

pictures: venv
	$(PICTURE) --figure memory -o docs/img/memory-light.svg
	$(PICTURE) --figure memory --dark -o docs/img/memory-dark.svg
	$(PICTURE) --figure lanes -o docs/img/lanes-light.svg
	$(PICTURE) --figure lanes --dark -o docs/img/lanes-dark.svg
	$(PICTURE) --curve 9 --figure curve -o docs/img/curve-light.svg
	$(PICTURE) --curve 9 --figure curve --dark -o docs/img/curve-dark.svg

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
