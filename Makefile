# Every target first makes a virtual environment with pinned packages; commands make model and data themselves.  Needs
# only Python 3.11 or newer with venv.
#   make demo      train SmolLM2-135M by reinforcement learning on this machine's CPU, a quarter of an hour
#   make quick     the heart of every room in a minute; starts no process
#   make test      the test suite        make test-all  ... and the tests that take minutes
#   make test-faults   every fault in many phases of a real run; writes docs/faults.md; half an hour on two idle cores
#   make test-options  every two values of options meet in a run of two steps (tests/options); some minutes
#   make test-mutations   single changes of the code at random: which does no test notice?  an hour
#   make test-gpu  all that needs a GPU, in stages, at most 8 minutes; make test-gpu STAGES=a,b: some of them (docs/gpu.md)
#   make test-older   the core's tests with the oldest torch, Triton and transformers that it runs with, on a CPU;
#                  OTHER_PYTHON=/path/to/python3.12 if that is not python3.12
#   make test-vllm drafter and plug-in in a real vLLM, in an environment of its own (make vllm-env)
#   make vllm-env  that environment: vLLM's build for GPUs where there is one, else for CPUs; make vllm-env VLLM=cuda: the
#                  first (4 GB to download); VLLM=cpu: the second
#   make check     lint, format, types, layers
#   make ui        show the runs         make doctor    what this machine has and uses, and what memory the demo takes
#   make wheelhouse     a kit of packages for a machine without an index, in OUT (docs/gpu.md); PRESENT=FILE: what is
#                  there, PYTHON_VERSION=3.12, MODEL=tokenizer or whole
#   make wheelhouse-trace   which packages such a kit needs, anew, by runs; five minutes
#   make plugin-wheel   the vLLM plug-in alone, as a wheel in dist (docs/vllm.md)
#   make lock      hashes of all pinned packages, anew      make audit   known weaknesses of those versions
#   make deploy    Prefect server and worker in the background, all deployments      make deploy-stop    end them

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
OLDER_VENV ?= .venv-older
VLLM ?= $(shell { command -v nvidia-smi || test -e /dev/nvidiactl; } >/dev/null && echo cuda || echo cpu)
CONFIG ?= conf/demo.yaml
PORT ?= 5000
GPU_OUT ?= reports/gpu
STAGES ?=
MUTATIONS ?=
PREFECT_PORT ?= 4200
PYTHON_VERSION ?= 3.12
OTHER_PYTHON ?= python$(PYTHON_VERSION)
PRESENT ?= deploy/present-cuda-image.txt
MODEL ?= tokenizer
OUT ?= dist/wheelhouse
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
  && { command -v $$p; break; }; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM)
VLLM_PINS := $(if $(filter cuda,$(VLLM)),deploy/requirements-vllm-cuda.txt,constraints-vllm.txt)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
OLDER_STAMP := $(OLDER_VENV)/.installed
# Tests use tiny tensors, which threads only slow down; two processes share the test files.
TEST_PROCESSES ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SHARED := -n $(TEST_PROCESSES) --dist loadfile

# Files of tests that start no process and take a minute together.
QUICK := kernels/attention kernels/layers kernels/loss kernels/tree kernels/sampling/test_token_logprob.py conf/test_load.py \
  tlt_vllm test_limits.py flows/test_config.py tasks/test_figures.py $(addprefix tlt_core/, \
  items/test_types.py items/test_store.py machine/test_disk.py data/test_prompt_order.py model/test_sampling.py \
  tuner/test_rule.py tuner/test_acceptance.py grpo/test_advantage.py grpo/test_batch.py grpo/test_exact_sum.py \
  grpo/test_loss.py drafter/ngram drafter/eagle3/test_gradients.py drafter/eagle3/test_windows.py rollout/test_static_rounds.py \
  idle_training/test_sampling.py export/test_mapping.py \
  cluster/test_dispatcher.py run/test_preflight.py run/test_validation.py)

.PHONY: demo quick test test-all test-faults test-options test-mutations test-gpu test-older test-vllm vllm-env check format \
  ui doctor deploy deploy-stop install lock audit wheelhouse wheelhouse-trace plugin-wheel
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/tlt train $(CONFIG)

quick: $(STAMP)
	$(PYTEST) $(SHARED) -m "not slow and not gpu" $(addprefix tests/,$(QUICK))

test: $(STAMP)
	$(PYTEST) $(SHARED) -m "not slow and not faults and not gpu and not vllm"

test-all: $(STAMP)
	$(PYTEST) $(SHARED) -m "not faults and not gpu and not vllm"

# Writes docs/faults.md whether or not all cases end as they have to; exits as pytest does.
test-faults: $(STAMP)
	FAULTS_REPORT=reports/faults/matrix.json $(PYTEST) -m faults tests/faults; code=$$?; \
	  $(BIN)/python -m tests.faults.table && exit $$code

# Runs of vLLM are skipped where it is not installed.
test-options: $(STAMP)
	$(PYTEST) tests/options

# The tool runs in an environment of its own, which is not kept; the tests run in the project's.
test-mutations: $(STAMP)
	$(BIN)/uv run --no-project --with cosmic-ray==8.7.0 python tests/mutations.py --python $(BIN)/python $(MUTATIONS)

# Installs nothing, since a GPU machine may have no package index.  Uses the environment's Python if there is one.
test-gpu:
	$(or $(wildcard $(BIN)/python),python3) tests/gpu_suite.py --out $(GPU_OUT) $(if $(STAGES),--only $(STAGES))

test-older: $(OLDER_STAMP)
	OMP_NUM_THREADS=1 $(OLDER_VENV)/bin/python -m pytest $(SHARED) -m "not slow and not faults and not gpu and not vllm" \
	  tests/kernels tests/tlt_core

test-vllm: $(STAMP) $(VLLM_STAMP)
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PYTEST) -m vllm tests/vllm

vllm-env: $(VLLM_STAMP)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: $(STAMP)
	$(BIN)/tlt ui --port $(PORT)

doctor: $(STAMP)
	$(BIN)/tlt doctor $(CONFIG)

deploy: $(STAMP)
	$(BIN)/tlt deploy --port $(PREFECT_PORT)

deploy-stop: $(STAMP)
	$(BIN)/tlt deploy --stop

install: $(STAMP)

lock: $(STAMP)
	$(BIN)/python deploy/lock.py

wheelhouse: $(STAMP)
	$(BIN)/python deploy/wheelhouse.py --python $(OTHER_PYTHON) --present $(PRESENT) --model $(MODEL) --out $(OUT)

plugin-wheel:
	$(PYTHON) -m venv dist/.venv
	dist/.venv/bin/python deploy/plugin_wheel.py

wheelhouse-trace: $(OLDER_STAMP)
	$(OLDER_VENV)/bin/python deploy/wheelhouse.py --trace

# Asks PyPI's advisory database, so it needs the internet.  --strict: a package that it does not know is a failure.
audit: $(STAMP)
	$(BIN)/uv tool run pip-audit@2.10.1 --strict --no-deps --disable-pip --requirement constraints.txt \
	  --requirement constraints-vllm.txt

# deploy/install.py prints what it does; it uses uv, and pip where uv fails.
$(STAMP): pyproject.toml constraints.txt $(wildcard deploy/requirements*.txt)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11-3.13 with venv was found;" \
	  "install one (Debian, Ubuntu: apt install python3-venv) or say make PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making a virtual environment in $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@$(BIN)/python deploy/install.py
	@touch $@

# vLLM's pins conflict with ours.  Every package is pinned without dependencies; only torch for CPUs brings its own.  The
# two builds share no environment.
$(VLLM_STAMP): $(VLLM_PINS) pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11-3.13 with venv was found" >&2; exit 2; }
	@test cpu = "$(VLLM)" -o cuda = "$(VLLM)" || { echo "make: VLLM=$(VLLM): say VLLM=cpu or VLLM=cuda" >&2; exit 2; }
	@echo "vLLM's build for $(VLLM) goes into $(VLLM_VENV); make vllm-env VLLM=cpu or VLLM=cuda chooses"
	test -e $@ || "$(PYTHON)" -m venv --clear $(VLLM_VENV)
	test cuda = $(VLLM) || $(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps $(if $(filter cuda,$(VLLM)),--require-hashes) -r $(VLLM_PINS)
	$(VLLM_PIP) --no-deps --no-build-isolation -e .
	touch $@

# As deploy/install.py does it, with other versions of a few packages.  PyPI's torch of that version brings CUDA.
$(OLDER_STAMP): constraints-older.txt pyproject.toml $(wildcard deploy/requirements*.txt)
	test -x $(OLDER_VENV)/bin/python || "$(OTHER_PYTHON)" -m venv $(OLDER_VENV)
	$(OLDER_VENV)/bin/python -m pip install --quiet --require-hashes -r deploy/requirements-build.txt
	$(OLDER_VENV)/bin/uv pip install --quiet --python $(OLDER_VENV)/bin/python --require-hashes --no-deps \
	  --no-build-isolation -r deploy/requirements.txt -r deploy/requirements-dev.txt
	$(OLDER_VENV)/bin/python -m pip install --quiet -r constraints-older.txt
	$(OLDER_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@
