# Needs Python 3.11 or newer and make; tests need gcc. Another interpreter: make PYTHON=/path/to/python3.12 demo

PYTHON ?= python3
# index: the build of torch that the package index has, for Linux the one with CUDA (2.6 GB to download, 5.4 GB on disk).
# cpu: the build without (0.2 GB, 0.7 GB on disk), which uv finds.
TORCH ?= index
MAIN_JOB := .venv/bin/ps-worker -n 4 --shards 2 --sync ssp --staleness 2 --compress topk:0.01+int8 bench/tasks/digits.py
# The pip of Python 3.11 and 3.12 (23.2) finds no version of torch's CUDA packages: make uses this one instead.
PIP := 26.3
UV := 0.13.9
INSTALLER := .venv/pip-$(PIP)
INSTALLED := .venv/installed
DEVELOPED := .venv/developed
PYTHONS := python3.11 python3.12 python3.13

# Where this is set, each of the hundreds of processes that tests start compiles our sources again: a quarter of what it costs.
unexport PYTHONDONTWRITEBYTECODE

FUZZ_SECONDS ?= 60

.PHONY: help install demo test check docs lock matrix wheel examples fuzz ptx gpu-kit bench-peers test-ray clean

help:
	@echo 'Each target installs what it needs into .venv. Without a GPU add TORCH=cpu: 0.2 GB to download instead of 2.6.'
	@echo 'make demo         install, then train digits: 4 workers, 2 shards, bounded staleness, 1 % of each update sent'
	@echo 'make test         install, run the same job quickly, then all tests'
	@echo 'make check        ruff, ruff format and mypy --strict'
	@echo 'make docs         build the pages of docs/ as a site in build/site; a warning is an error'
	@echo 'make matrix       the unit tests (TESTS=) on another PYTHON= and TORCH=, as in: make matrix PYTHON=python3.13 TORCH=2.6'
	@echo 'make wheel        build wheel and sdist into dist/, install each into an empty environment and run the demo there'
	@echo 'make lock         write lock.txt anew: newest versions, for the interpreters in PYTHONS="$(PYTHONS)"'
	@echo 'make examples     install trainers and loaders (Hugging Face, Lightning, torchtitan, litdata, ...) apart, and run examples/ with them'
	@echo 'make fuzz         every decoder under coverage-guided fuzzing, FUZZ_SECONDS=60 each; installs atheris'
	@echo 'make ptx          compile each CUDA kernel for sm_80, sm_90 and sm_100 and check it, without a GPU; make test has sm_90'
	@echo 'make gpu-kit      make .gpu/, what a machine with a GPU and no package index needs to run bench/gpu/device.py'
	@echo 'make bench-peers  install torchft for bench/contenders/wan.py and speed/pace.py, in .venv-torchft'
	@echo 'make test-ray     install Ray in .venv-ray, and test narrows.worker.ray there'
	@echo 'make clean        remove builds, caches and run output; environments stay'

install: $(DEVELOPED)

demo: $(INSTALLED)
	$(MAIN_JOB)

test: $(DEVELOPED)
	$(MAIN_JOB) --steps 100
	.venv/bin/pytest -n 5 --dist worksteal

# mypy does not see the package-dir map of an editable install: it gets a folder with one symlink, `narrows`, instead.
check: $(DEVELOPED) build/mypy/narrows
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	cd build/mypy && ../../.venv/bin/mypy --config-file ../../pyproject.toml \
		narrows/protocols narrows/compression narrows/ps narrows/worker narrows/tests narrows/bench narrows/docs
	.venv/bin/python docs/states.py --check
	.venv/bin/python docs/capabilities.py --check
	.venv/bin/python docs/memory_table.py --check
	.venv/bin/python -m bench.report --check
	.venv/bin/python docs/sizes.py

docs: $(DEVELOPED)
	.venv/bin/python -m pip install -q -c lock.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

# TORCH is a version here, and the environment is made for this run alone.
matrix:
	PYTHON=$(PYTHON) TORCH=$(TORCH) PIP=$(PIP) .ci/matrix

fuzz: $(DEVELOPED)
	.venv/bin/python -m pip install -q -c lock.txt -e '.[fuzz]'
	.venv/bin/python bench/faults/fuzz.py --seconds $(FUZZ_SECONDS)

ptx: $(DEVELOPED)
	cd tests && NARROWS_CUDA_COMPILER=1 ../.venv/bin/python -m kit.cuda_linked

gpu-kit: $(DEVELOPED)
	bash bench/gpu/kit.sh

build/mypy/narrows:
	mkdir -p build/mypy
	ln -sfn ../.. $@

wheel: $(DEVELOPED)
	.ci/wheel

lock: | $(INSTALLER)
	.venv/bin/python .ci/lock.py $(PYTHONS)

$(INSTALLER):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo '$(PYTHON) is not Python 3.11 or newer, which Narrows needs: name one with make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@case '$(TORCH)' in index|cpu) ;; *) echo 'TORCH=$(TORCH) is neither index nor cpu' >&2; exit 1;; esac
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q pip==$(PIP)
	touch $@

# pip finds the build for the CPU where its own configuration names a place that has it; uv knows that of PyTorch.
TORCH_cpu = .venv/bin/python -m pip install -q '$(shell grep ^torch== constraints.txt)+cpu' 2>/dev/null || { \
	.venv/bin/python -m pip install -q uv==$(UV) && \
	.venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu -c constraints.txt torch; }

$(INSTALLED): EXTRAS = bench$(if $(filter index,$(TORCH)),$(COMMA)cuda)
$(DEVELOPED): EXTRAS = bench,cuda,dev
COMMA := ,

# Only what a run imports is compiled to bytecode: all of it would be half of an installation's time. The first optimizer of a
# script imports torch._dynamo.
$(INSTALLED) $(DEVELOPED): pyproject.toml lock.txt | $(INSTALLER)
	$(TORCH_$(TORCH))
	.venv/bin/python -m pip install --no-compile -c lock.txt -e '.[$(EXTRAS)]'
	.venv/bin/python -P -m narrows.compression
	.venv/bin/python -P -c 'import torch._dynamo'
	touch $@

examples: .venv-examples/installed
	.venv-examples/bin/pytest tests/examples

bench-peers: .venv-torchft/installed

# By the interpreter of .venv: bench/tasks/bytelm.py trains on its library.
.venv-%/installed: pyproject.toml constraints.txt | $(INSTALLER)
	.venv/bin/python -m venv .venv-$*
	.venv/bin/python -m pip --python .venv-$*/bin/python install -c constraints.txt -e '.[$*$(WITH_$*)]'
	$(THEN_$*)
	touch $@

WITH_ray := ,dev
# litdata asks for it, for images alone. PyPI's is made for CUDA: beside a torch for the CPU it breaks whoever imports it.
THEN_examples := .venv-examples/bin/python -m pip uninstall -q -y torchvision

test-ray: .venv-ray/installed
	.venv-ray/bin/python -P -m narrows.compression
	.venv-ray/bin/pytest tests/system/test_ray.py

clean:
	rm -rf build dist narrows.egg-info bench/out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
