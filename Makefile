# Each target sets up what it needs: a virtual environment with this project, and the exported
# modules. A second run finds both. On a machine without a network say VENV= (empty): PYTHON's own
# environment and the modules in the store are then used as they are.
PYTHON ?= python3
VENV ?= .venv
STORE := ctm_rt/modules/prebuilt

GPU := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -Em1 '^[0-9]+\.[0-9]+$$')
# Of the first GPU, e.g. 9.0 -> sm_90a; without one the arch that has been run on hardware.
GPU_ARCH ?= $(if $(GPU),$(shell echo $(GPU) | awk -F. '{print "sm_" $$1 $$2 ($$1 >= 9 ? "a" : "")}'),sm_90a)

ifeq ($(VENV),)
run := $(PYTHON)
else
run := $(VENV)/bin/python
ready := $(VENV)/.ready
modules := $(STORE)/$(GPU_ARCH)/.exported
sources := $(shell find kernels examples -name '*.py') ctm_rt/modules/driver_shim.c \
	ctm_rt/modules/link.py ctm_rt/modules/manifest.py ctm_rt/decode/plan.py ctm_rt/paged_kv/layout.py

$(ready): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(run) -m pip install --quiet --editable '.[dev]'
	touch $@

$(modules): $(sources) | $(ready)
	$(MAKE) kernels
	touch $@
endif

demo: $(ready) $(modules)
	$(run) -m ctm_rt demo

test: lint type
	$(run) -m pytest
ifneq ($(GPU),)
	$(MAKE) gpu
endif

lint: $(ready)
	$(run) -m ruff check .
	$(run) -m ruff format --check .

type: $(ready)
	$(run) -m mypy

gpu: $(ready) $(modules)
	$(run) -m pytest -m gpu tests/gpu

kernels: $(ready)
	$(run) -m kernels.export --arch $(GPU_ARCH) --out $(STORE)
	$(run) -m examples.stranger_kernel build/stranger $(GPU_ARCH)

bench: $(ready) $(modules)
	$(run) -m ctm_rt bench

.PHONY: demo test lint type gpu kernels bench
