# Everything this project does, by name; `make` alone lists it.
#
#   PYTHON  interpreter that creates the environment      make test PYTHON=python3.13
#   VENV    where the environment lives                   make test VENV=/tmp/floor JAX=0.10.0
#   JAX     version of JAX; empty for the newest one      make test JAX=0.10.0
#   JOBS    processes that run tests                      make test JOBS=8
#   SLOW    1 to run the slow tests too                   make test SLOW=1
#   ARGS    handed on to the command behind the target    make test ARGS="-k policy"
#                                                         make demo ARGS="--steps 50"
PYTHON ?= python3
VENV   ?= .venv
JAX    ?=
JOBS   ?= 2
SLOW   ?=
ARGS   ?=

BIN    := $(VENV)/bin
# Named after JAX's version: asking for another one installs it, going back does so too.
STAMP  := $(VENV)/.mpjax-dev-$(if $(JAX),jax-$(JAX),jax-newest)
# Goes when the one above is renewed: libtpu belongs to one version of JAX.
LIBTPU := $(STAMP)-libtpu

PYTHON_IS_NEW := 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	f"mpjax needs Python >= 3.11; $(PYTHON) is {v[0]}.{v[1]}.\n  Try: make PYTHON=python3.12")'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test tpu lint format types bench docs package clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## create or refresh the environment in $(VENV)

# An environment whose interpreter is gone or too old is made anew; any other is kept and brought up to date.
# pyproject.toml is the only input: the package itself is installed in editable form. `--no-compile`: Python compiles
# what is imported when it is; pip would compile all of every package, two thirds of the time.
$(STAMP): pyproject.toml
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { $(PYTHON) -c $(PYTHON_IS_NEW) && $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy only-if-needed \
		--editable '.[dev]' $(if $(JAX),'jax==$(JAX)' 'jaxlib==$(JAX)',jax)
	@rm -f $(VENV)/.mpjax-dev-*
	@touch $@

demo: $(STAMP)  ## train on real digits in four precisions; a table and outputs/digits.png
	$(BIN)/python examples/digits.py $(ARGS)

test: $(STAMP)  ## run the tests, with doctests, the README and some pages and examples
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(SLOW),-m '') $(ARGS)

$(LIBTPU): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile 'jax[tpu]$(if $(JAX),==$(JAX))'
	@touch $@

tpu: $(LIBTPU)  ## compile for TPUs that are not here: the tests that need libtpu (0.6 GB)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'tpu_compiler and not slow' \
		$(shell grep -rl tpu_compiler tests --include='test_*.py') $(ARGS)

lint: $(STAMP)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## mend what `make lint` can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pyright finds the environment by PATH: with --verifytypes it does not heed --pythonpath.
types: $(STAMP)  ## check types: the code, then that every public name is fully typed
	PATH="$(abspath $(BIN)):$$PATH" pyright
	PATH="$(abspath $(BIN)):$$PATH" pyright --verifytypes mpjax --ignoreexternal

bench: $(STAMP)  ## run every benchmark that needs no GPU, one after another
	@for file in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

docs: $(STAMP)  ## build the documentation into site/; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d site/.doctrees docs site $(ARGS)
	@echo "open site/index.html"

package: $(STAMP)  ## build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

clean:  ## remove all that the targets above made, environments included
	rm -rf $(VENV) .venv-floor .venv-middle .venv-newest dist site outputs .pytest_cache .ruff_cache .hypothesis
	find mpjax tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
