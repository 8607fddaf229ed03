# Each target works as the first command in a fresh clone, without root: it makes .venv and installs what it needs.
# A second run starts at once; stamps follow pyproject.toml, constraints.txt and the C sources.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check --no-input
ROBOTS := $(or $(TAKTD_ROBOTS),../shared/robots)
PYTHONS := python3.11 python3.10
RTX := 1.7.1.116
PERF_ANALYZER := 2.60.0

export ORT_DISABLE_TELEMETRY := 1
unexport PYTHONPATH PYTHONHOME

CORE := $(wildcard setup.py ipc/*.c ipc/core/*.c ipc/core/*.h drivers/*.c drivers/*.h)
say = @echo "$(1)" >&2

.PHONY: help demo test test-long test-slow test-gpu-fakes test-rtx test-perf-analyzer lint bench sanitize fuzz proto deb wheelhouse deb-test deb-gpu deb-gpu-test constraints clean

help:
	@echo "make demo       a pendulum, swung up and balanced by a network that taktd runs (under 50 s)"
	@echo "make test       linters and tests, under 10 minutes"
	@echo "make test-long  whole daemons, killed, flooded and swapped: a quarter of an hour"
	@echo "make test-slow  the tests that take minutes each"
	@echo "make test-gpu-fakes  the GPU path with the real pycuda, compiled once (minutes), on a simulated driver"
	@echo "make test-rtx   building engines with the real TensorRT-RTX (95 MB, downloaded once), on the CPU"
	@echo "make test-perf-analyzer  Triton's load generator (7 MB, downloaded once) against gRPC; needs glibc 2.38 or deb-test's box"
	@echo "make lint       ruff, mypy, layering, links, documents (part of make test)"
	@echo "make sanitize   the C core under the address and undefined-behaviour sanitizers"
	@echo "make fuzz       the C core against a hostile client, for FUZZ_SECONDS; parsers, FUZZ_INPUTS inputs each; TAKTD_SEED"
	@echo "make bench      bench/results.json and the table in docs/performance.md; best as root"
	@echo "make deb        the Debian packages, offline once their wheels are there (make wheelhouse fetches them)"
	@echo "make deb-test   their whole life in throwaway machines, as root"
	@echo "make deb-gpu    the package taktd-gpu for both releases (downloads 0.5 GB, compiles pycuda; once), as root"
	@echo "make deb-gpu-test  its life in throwaway machines, on a simulated driver, as root"
	@echo "make proto      the Python modules that are generated from ipc/grpc/*.proto"
	@echo "make constraints  pin the newest versions that pyproject.toml allows, with: $(PYTHONS)"

demo: $(VENV)/.core
	@$(VENV)/bin/taktctl demo $(ARGS)

test: $(VENV)/.core $(VENV)/.tests
	@$(PY) -m pytest -q -m "not slow and not long" $(ARGS)

test-long: $(VENV)/.core $(VENV)/.tests
	@$(PY) -m pytest -q -m "long and not slow" $(ARGS)

test-slow: $(VENV)/.core $(VENV)/.tests
	@$(PY) -m pytest -q -m slow $(ARGS)

test-gpu-fakes: $(VENV)/.core $(VENV)/.tests
	@PYTHONPATH=. $(PY) tests/fakes/cuda/pycuda_wheel.py build/gpu-fakes
	@PYTHONPATH=build/gpu-fakes/site $(PY) -m pytest -q tests/conformance tests/unit/test_pycuda.py \
	  tests/unit/test_cuda_driver.py tests/unit/test_cuda_constants.py tests/unit/test_tensorrt_engine.py \
	  tests/unit/test_tensorrt_plans.py tests/unit/test_gpu_events.py tests/unit/test_doctor.py $(ARGS)

build/rtx/site/.$(RTX):
	@rm -rf build/rtx/site
	@$(PIP) install --no-deps --target build/rtx/site tensorrt-rtx-cu13-libs==$(RTX) tensorrt-rtx-cu13-bindings==$(RTX)
	@touch $@

test-rtx: $(VENV)/.core $(VENV)/.tests build/rtx/site/.$(RTX)
	@PYTHONPATH=build/rtx/site $(PY) -m pytest -q -m rtx tests/rtx $(ARGS)

# Its wheel names a glibc newer than this machine may have; the test finds one that runs it.
build/perf-analyzer/.$(PERF_ANALYZER): | $(VENV)/.made
	@rm -rf build/perf-analyzer
	@$(PIP) install --no-deps --target build/perf-analyzer --only-binary :all: --platform manylinux_2_38_$(shell uname -m) \
	  perf-analyzer==$(PERF_ANALYZER)
	@touch $@

test-perf-analyzer: $(VENV)/.core $(VENV)/.tests build/perf-analyzer/.$(PERF_ANALYZER)
	@$(PY) -m pytest -q tests/system/test_perf_analyzer.py $(ARGS)

lint: $(VENV)/.core $(VENV)/.tests
	@$(PY) -m pytest -q tests/unit/test_style.py $(ARGS)

bench: $(VENV)/.core
	@$(PY) bench/run.py $(ARGS)

sanitize:
	$(call say,building and running the C core under the sanitizers)
	@$(MAKE) --no-print-directory -C ipc/core sanitize

fuzz: $(VENV)/.core $(VENV)/.tests
	@$(MAKE) --no-print-directory -C ipc/core fuzz
	@FUZZ_INPUTS=$(or $(FUZZ_INPUTS),3000000) TAKTD_SEED=$${TAKTD_SEED:-$$(date +%s)} \
	  $(PY) -m pytest -q --timeout 0 tests/property/test_parser_fuzz.py $(ARGS)

deb:
	@packaging/build $(ARGS)

wheelhouse:
	@packaging/wheelhouse $(ARGS)

deb-test:
	@packaging/test/run $(ARGS)

deb-gpu:
	@packaging/gpu $(ARGS)

deb-gpu-test:
	@packaging/test/gpu $(ARGS)

clean:
	rm -rf $(VENV) build ipc/_core*.so drivers/_cuda*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@$(MAKE) --no-print-directory -C ipc/core clean

# 1. The environment: the first Python ≥ 3.10 on PATH that can make one.
$(VENV)/.made:
	@command -v $${CC:-cc} >/dev/null || { echo "No C compiler found. On Debian and Ubuntu: apt install gcc" >&2; exit 2; }
	@for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	  $$python -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null || continue; \
	  $$python -c 'import venv, ensurepip' 2>/dev/null || { lacks_venv=$$python; continue; }; \
	  $$python -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
	    || { lacks_headers=$$python; continue; }; \
	  echo "[1/3] making $(VENV) with $$($$python --version)" >&2; \
	  $$python -m venv $(VENV) && touch $@ && exit 0; \
	done; \
	if [ -n "$$lacks_venv" ]; then echo "$$lacks_venv has no venv. On Debian and Ubuntu: apt install python3-venv" >&2; \
	elif [ -n "$$lacks_headers" ]; then echo "$$lacks_headers has no headers. On Debian and Ubuntu: apt install python3-dev" >&2; \
	else echo "No Python ≥ 3.10 on PATH. On Debian 12, Ubuntu 22.04 and newer: apt install python3 python3-venv python3-dev" >&2; fi; \
	exit 2

# 2. Packages, as pinned. pip itself first: dependency groups need 25.1.
$(VENV)/.packages: pyproject.toml constraints.txt | $(VENV)/.made
	$(call say,[2/3] installing packages as pinned in constraints.txt)
	@$(PIP) install -c constraints.txt pip setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[plot]'
	@touch $@

$(VENV)/.tests: pyproject.toml constraints.txt | $(VENV)/.packages
	$(call say,installing what the tests need)
	@$(PIP) install -c constraints.txt --group dev
	@if [ -d "$(ROBOTS)" ]; then $(PIP) install -c constraints.txt --group robot \
	  || echo "mujoco is not to be had here: the walking-robot test will be skipped" >&2; fi
	@touch $@

# 3. The C core, in place.
$(VENV)/.core: $(CORE) $(VENV)/.packages
	$(call say,[3/3] compiling the C core)
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

proto: $(VENV)/.tests
	@$(PY) -m taktd.ipc.grpc.generate

constraints: $(VENV)/.made
	@$(PY) packaging/pin.py $(PYTHONS)
