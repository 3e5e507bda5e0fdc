# Everything runs in .venv, made once by the first target that needs it and brought up to date when setup.cfg,
# pyproject.toml or constraints.txt changes. Another choice of extras: make test EXTRAS=cuda13,md,test

PYTHON ?= python3
EXTRAS ?= cpu,md,test
MODEL ?=
DEMO_MODEL = $(or $(MODEL),alanine-dipeptide-gfn2)
DEMO_TIME ?= 10 ps
SOAK_ARGS ?=
PUBLISHED := aceff-1.1 aceff-2.0
# Some that use the weights, or stand-ins for them.
ALONE_TESTS ?= tests/models
# Those of the default extras; the CUDA ones ask for other versions of torch.
CONSTRAINTS ?= $(if $(findstring cuda,$(EXTRAS)),,constraints.txt)
# Files in the order of tests/conftest.py
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
# One thread for each of the processes that share the cores.
export OMP_NUM_THREADS ?= 1

comma := ,
BIN := .venv/bin
STAMP := .venv/.stamp-$(subst $(comma),-,$(EXTRAS))
# The versions of OpenMM and PyTorch that test-matrix lays over .venv, of which everything else is; the tests that touch OpenMM.
MATRIX_OPENMM ?= 8.4 8.5 8.6
MATRIX_TORCH ?= 2.10 2.12
MATRIX := $(foreach openmm,$(MATRIX_OPENMM),$(MATRIX_TORCH:%=.venv-matrix/openmm-$(openmm)-torch-%))
MATRIX_TESTS ?= $(addprefix tests/,test_imports.py $(addprefix forces/test_,$(addsuffix .py,backends force mixed states)) md/test_simulation.py)
PEERS := openmmml==1.8 torchmd-net==3.1.0
PEERS_STAMP := .venv-peers/.stamp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install constraints models kernels demo docs test test-alone test-slow test-mutations test-matrix soak soak-minimize soak-long lint format bench bench-peers bench-gpu oracle train clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with EXTRAS (default: cpu,md,test)

constraints: $(STAMP)  ## write the versions in .venv to constraints.txt, which `make install` keeps to
	$(BIN)/python .ci/constraints.py $(EXTRAS) > $@.part
	mv $@.part constraints.txt

demo: $(STAMP)  ## molecular dynamics of alanine dipeptide and pictures of it; MODEL=file.ckpt: another model, DEMO_TIME (10 ps)
	$(BIN)/openmm-tensornet simulate --model "$(DEMO_MODEL)" examples/alanine_dipeptide.pdb \
	    --time "$(DEMO_TIME)" --output out/demo --overwrite
	$(BIN)/openmm-tensornet analyze out/demo --model "$(DEMO_MODEL)"

docs: $(STAMP)  ## build the documentation in out/docs; a warning is an error
	$(BIN)/python -m sphinx -q -E -W --keep-going docs out/docs
	@echo "open out/docs/index.html"

models: $(STAMP)  ## fetch AceFF's weights, which some tests and the benchmarks use
	$(BIN)/python -m pip install -q $(CONSTRAINTS:%=-c %) -e '.[models]'
	for name in $(PUBLISHED); do $(BIN)/openmm-tensornet info $$name || exit 1; done

# Once here, both precisions at a time, rather than in each of the processes that run tests.
kernels: $(STAMP)
	@printf 'float32\nfloat64\n' | xargs -P 2 -I {} $(BIN)/python -c 'import torch; from openmm_tensornet.kernels import operators; \
	    operators.available() and torch.ops.openmm_tensornet.normalize(torch.ones(9, 1, 3, dtype=torch.{}))'

test: kernels  ## run the tests, except those that take minutes
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# With the compiled kernels, which Numba knows by the times of their sources.
test-alone: kernels  ## run ALONE_TESTS in a clone in an empty folder, with none of AceFF's weights to be found
	rm -rf out/alone
	git clone -q . out/alone/clone
	cp -Rp openmm_tensornet/kernels out/alone/clone/openmm_tensornet
	cd out/alone/clone && HF_HUB_OFFLINE=1 HF_HUB_CACHE=$(CURDIR)/out/alone/hub OPENMM_TENSORNET_MODELS= PYTHONPATH=$(CURDIR)/out/alone/clone \
	    $(CURDIR)/$(BIN)/python -m pytest $(ALONE_TESTS) $(PYTEST_ARGS)

test-slow: $(STAMP)  ## run the tests that take minutes, showing what they measure
	$(BIN)/python -m pytest -m slow -s

test-mutations: $(STAMP)  ## check that tests without AceFF's weights notice one wrong sign, in some minutes
	$(BIN)/python tests/mutations.py

test-matrix: $(MATRIX)  ## run MATRIX_TESTS with other versions of OpenMM and PyTorch
	@for versions in $(MATRIX); do \
	    echo "$$versions"; PYTHONPATH=$(CURDIR)/$$versions $(BIN)/python -m pytest $(MATRIX_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

soak: $(STAMP)  ## half an hour of mutated files, killed runs and random models; prints what was tried; SOAK_ARGS
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

soak-minimize: $(STAMP)  ## a quarter of an hour of minimisations from distorted structures with both AceFF models; SOAK_ARGS
	$(BIN)/python tests/soak_minimize.py $(SOAK_ARGS)

soak-long: $(STAMP)  ## long runs of alanine dipeptide, some hours, in out/soak-long; continues what was stopped
	$(BIN)/python tests/soak_long.py $(SOAK_ARGS)

lint: $(STAMP)  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## fix the imports' order and the format
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

bench: kernels  ## time this package, in under two minutes
	$(BIN)/python -m benchmarks.run --quick $(if $(MODEL),--model "$(MODEL)")

bench-peers: kernels $(PEERS_STAMP)  ## time this package and its peers, all systems
	$(BIN)/python -m benchmarks.run --peers --breakdown $(if $(MODEL),--model "$(MODEL)")

bench-gpu: $(STAMP)  ## check this package on an NVIDIA GPU and time it there, in ten minutes; EXTRAS=cuda13,md
	$(BIN)/python -m benchmarks.gpu $(if $(MODEL),--model "$(MODEL)")

oracle: $(PEERS_STAMP)  ## create .venv-peers with torchmd-net and openmm-ml, whose numbers we match

train: $(STAMP)  ## train the model of the package again, in some hours, in out/train; continues what was stopped
	$(BIN)/python -m pip install -q -e '.[train]'
	$(BIN)/python examples/train_alanine_dipeptide.py train

clean:  ## remove what building, testing and the demo leave behind (environments stay)
	rm -rf build dist *.egg-info out/demo out/docs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python .venv-peers/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' || { \
	    echo "PYTHON=$(PYTHON): Python 3.10 to 3.13 is needed (TorchScript ends there). Name one: make ... PYTHON=python3.12" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(@D:/bin=)

# All openmmtorch builds own the same files: another one than EXTRAS asks for must leave first.
$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@echo "Installing openmm-tensornet[$(EXTRAS)] into .venv; PyTorch alone is a download of gigabytes."
	rm -f .venv/.stamp-*
	@for build in cpu:cpu cuda12:cu12 cuda13:cu13; do \
	    case ",$(EXTRAS)," in *,$${build%:*},*) ;; *) $(BIN)/python -m pip uninstall -qy acellera-openmmtorch-$${build#*:} 2>/dev/null ;; esac; \
	done
	$(BIN)/python -m pip install $(CONSTRAINTS:%=-c %) -e '.[$(EXTRAS)]'
	@touch $@

.SECONDARY: $(MATRIX_TORCH:%=.venv-matrix/torch-%)
.SECONDEXPANSION:
# openmmtorch looks for PyTorch beside itself, hence the links.
# It does not fit OpenMM 8.6: None in sys.modules hides that of .venv. openmm-ml 1.8 goes with OpenMM 8.6, the one in .venv with older ones.
.venv-matrix/openmm-%: .venv-matrix/torch-$$(lastword $$(subst -, ,$$*)) | $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install -q --no-compile --no-deps --target $@.part 'openmm==$(firstword $(subst -, ,$*)).*' \
	    $(if $(filter 8.6-%,$*),openmmml==1.8,acellera-openmmtorch-cpu==1.10)
	$(if $(filter 8.6-%,$*),echo 'import sys; sys.modules["openmmtorch"] = None' > $@.part/sitecustomize.py)
	ln -s $(CURDIR)/$</* $@.part
	mv $@.part $@

.venv-matrix/torch-%: | $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install -q --target $@.part 'torch==$*.*'
	mv $@.part $@

$(PEERS_STAMP): | .venv-peers/bin/python
	.venv-peers/bin/python -m pip install $(PEERS)
	@touch $@
