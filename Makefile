# make train    set-up and the main job: the tiny policy learns arithmetic (configs/tiny.py)
# make test     set-up, lint and tests
# make clean    remove the environment and the runs

PYTHON ?= python3
WORKDIR ?= runs/tiny
STAMP := .venv/requirements.txt

.PHONY: train test setup clean

train: setup
	.venv/bin/python -m dapo_jax.train --config=configs/tiny.py --workdir=$(WORKDIR) $(ARGS)

test: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest $(ARGS)

setup: $(STAMP)

# The copy of the requirements is written last, so an interrupted set-up is done again.
$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	cp requirements.txt $(STAMP)

clean:
	rm -rf .venv runs
