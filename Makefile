# Everything anybody needs: `make calibrate` and `make test`. Both install into .venv once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CHECKERS := $(VENV)/checkers
BUILDERS := $(VENV)/builders
# Containers often set it: every process of a test would then compile all sources again.
unexport PYTHONDONTWRITEBYTECODE
PROCESSES := -n auto --maxprocesses=4
# A file stays with one process, or is shared when a process would wait: what is slow is so in few files.
PARALLEL := $(PROCESSES) --dist loadfile
STEALING := $(PROCESSES) --dist worksteal
TESTS = $(sort $(shell find tests -name 'test_*.py'))
# What is worth compiling as users do (an XLA_FLAGS of nothing): tests/conftest.py has all else compiled quickly. Not
# models on several devices, which are compared with one device, nor native code, which XLA does not compile.
COMPILED = $(filter-out $(addprefix %/test_,device_groups.py compilation.py) tests/calm_beam/model/native/%, \
    $(filter $(addprefix tests/calm_beam/,decoding/% exits/% model/% serving/%),$(TESTS)))
# What rather runs than compiles, and for long.
RUNNING := $(addprefix tests/,calm_beam/test_reference_goldens.py test_accelerator_benchmark.py test_benchmarks.py test_tutorials.py)
# What decides about outputs and thresholds.
COMPUTING = $(addprefix tests/,calm_beam/risk calm_beam/calibration calm_beam/serving calm_beam/checkpoints/test_round_trips.py \
        $(addprefix transforms/test_,early_exit.py generate.py losses.py monitor_risk.py pipeline.py probed_answers.py) \
        $(addprefix launch/test_,decode.py calibrate.py generate.py)) \
    $(filter tests/calm_beam/decoding/% tests/calm_beam/exits/%,$(COMPILED))
# What takes a minute: neither computes with models, nor runs a pipeline, a browser or TensorFlow.
FAST := calm_beam tests/tools/demo_task tests/validity \
    $(filter-out $(addprefix tests/calm_beam/,__pycache__/ decoding/ evaluation/ exits/ model/ serving/ test_reference_goldens.py training/), \
        $(wildcard tests/calm_beam/*/ tests/calm_beam/test_*.py)) \
    $(addprefix tests/calm_beam/,model/native exits/test_rule.py decoding/test_settings.py \
        $(addprefix evaluation/test_,cost.py device_forecast.py flops.py outcomes.py speedup.py splits.py)) \
    $(addprefix tests/launch/test_,accelerators.py cli.py dataflow.py flags.py flex_template.py inspect.py progress.py \
        runner_flags.py) \
    $(addprefix --ignore=tests/calm_beam/,$(addprefix report/test_,accessibility.py browser.py labels.py reading.py) metrics/test_bleurt.py \
        inputs/test_tensorflow_formats.py)

.PHONY: calibrate test test-slow test-compiled test-old nightly test-fast test-exhaustive test-validity matrix wheels accelerators accelerators-all flink lint format types docs pictures demo-model clean

calibrate: $(INSTALLED)  ## prove three tolerances for the demo model on demo data
	$(BIN)/calm-beam calibrate --consistency=textual --delta=0.02,0.05,0.1 --serve=textual,0.05 --output=build/demo-calibration --overwrite

test: $(INSTALLED) lint types  ## lint, format, types, and tests of every module (half an hour on two cores)
	$(BIN)/python -m pytest -m "not slow and not exhaustive" $(PARALLEL) $(addprefix --ignore=,$(RUNNING))
	XLA_FLAGS= $(BIN)/python -m pytest -m "not slow and not exhaustive" $(STEALING) $(RUNNING)

test-slow: $(INSTALLED)  ## simulations, killed processes, worker processes, malformed files, browsers (a quarter of an hour)
	$(BIN)/python -m pytest -m slow $(STEALING) $(filter-out $(RUNNING),$(TESTS))
	XLA_FLAGS= $(BIN)/python -m pytest -m slow $(STEALING) $(RUNNING)

test-compiled: $(INSTALLED)  ## the tests of models and decoders again, compiled as users do (ten minutes)
	XLA_FLAGS= $(BIN)/python -m pytest -m "not slow and not exhaustive" $(STEALING) $(COMPILED)

test-old: $(INSTALLED)  ## what decides about outputs and thresholds again, as on an old processor with one core (ten minutes)
	$(BIN)/python -m tests.old_processor --share -m "not slow and not exhaustive" $(COMPUTING)

nightly: test-slow test-compiled test-old test-exhaustive test-validity accelerators matrix wheels  ## all that no change waits for

test-fast: $(INSTALLED)  ## the core without models, and flags (a minute)
	$(BIN)/python -m pytest -m "not slow and not exhaustive" $(PARALLEL) $(FAST)

test-exhaustive: $(INSTALLED)  ## every exit rule in every decoder, and all that other tests sample (half an hour)
	$(BIN)/python -m pytest -m exhaustive $(STEALING)

test-validity: $(INSTALLED)  ## the guarantee itself: 10,000 simulated calibrations in every world (some minutes)
	$(BIN)/python -m pytest tests/validity
	$(BIN)/python -m tests.validity --output=build/validity.md

matrix: $(INSTALLED)  ## test-fast on every Python that is here, with the lowest and the newest versions (an hour); MATRIX=--python=3.12 for one
	$(BIN)/python -m tools.matrix --output=build/matrix $(MATRIX) $(FAST)

wheels: $(BUILDERS)  ## both wheels, each used from empty environments on every Python that is here; WHEELS=--python=3.12 for one
	$(BIN)/python -m tools.wheels --output=build/wheels $(WHEELS)

# libtpu, JAX's CUDA plugin and an assembler, in a folder of their own: never a dependency (CONTRIBUTING.md says why).
accelerators: $(INSTALLED)  ## the accelerators' own compilers make what a change may break, without a device (four minutes)
	$(BIN)/python -m tools.accelerators --output=build/accelerators.json

accelerators-all: $(INSTALLED)  ## every program for every device, and each check on a broken copy (an hour)
	$(BIN)/python -m tools.accelerators --all --output=build/accelerators-all.json

flink: $(INSTALLED)  ## every command on clusters of Flink and Spark on this machine, and on Prism, compared with one process (needs Java, Maven and Go); FLINK=--runners=prism for one
	$(BIN)/python -m tools.flink --output=build/flink $(FLINK)

lint: $(CHECKERS)  ## ruff; neither this nor the next needs Beam or TensorFlow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(CHECKERS)
	$(BIN)/mypy calm_beam tests benchmarks tools

format: $(CHECKERS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## the documentation site, in build/site; broken links and pages that nothing leads to end it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

pictures: $(INSTALLED)  ## make the documentation's pictures again (about ten minutes; needs Chromium); PICTURES=--only=report for one
	$(BIN)/python -m tools.pictures --output=docs/pictures $(PICTURES)

demo-model: $(INSTALLED)  ## regenerate the demo data and train the demo model again (about an hour)
	$(BIN)/python -m tools.demo_task.write_data --output=build/demo
	$(BIN)/calm-beam train --data=build/demo/training.jsonl.gz --validation_data=build/demo/validation.jsonl.gz \
	    --vocab_size=1024 --steps=2400 --max_input_length=48 --max_target_length=48 --seed=1 --stored_dtype=float16 \
	    --output=build/demo/model --overwrite

# Installed again whenever the requirements or native code change, and not otherwise. Modules are compiled when they are
# imported: compiling all of them, most of which nothing imports, would take longer than all else here.
$(INSTALLED): setup.py pyproject.toml $(wildcard calm_beam/model/native/*.[ch]) $(addprefix calm_beam/model/native/,build.py structures.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $(INSTALLED)

# What checks the sources without running them. What is all installed has it too.
$(CHECKERS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group lint --group types
	touch $(CHECKERS)

$(BUILDERS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group wheels
	touch $(BUILDERS)

clean:
	rm -rf $(VENV) build dist *.egg-info calm_beam/model/native/*.so
