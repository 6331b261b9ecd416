# Needs Python 3.11 or newer and make; tests need gcc. Another interpreter: make PYTHON=/path/to/python3.12 demo

PYTHON ?= python3
MAIN_JOB := .venv/bin/ps-worker -n 4 --shards 2 --sync ssp --staleness 2 --compress topk:0.01+int8 bench/tasks/digits.py
INSTALLED := .venv/installed

# Where this is set, each of the hundreds of processes that tests start compiles our sources again: a quarter of what it costs.
unexport PYTHONDONTWRITEBYTECODE

FUZZ_SECONDS ?= 60

.PHONY: help install demo test check examples fuzz ptx bench-peers test-ray clean

help:
	@echo 'make demo         install, then train digits: 4 workers, 2 shards, bounded staleness, 1 % of each update sent'
	@echo 'make test         install, run the same job quickly, then all tests'
	@echo 'make check        ruff, ruff format and mypy --strict'
	@echo 'make examples     install trainers and loaders (Hugging Face, Lightning, torchtitan, litdata, ...) apart, and run examples/ with them'
	@echo 'make fuzz         every decoder under coverage-guided fuzzing, FUZZ_SECONDS=60 each; installs atheris'
	@echo 'make ptx          compile each CUDA kernel for sm_80, sm_90 and sm_100 and check it, without a GPU; make test has sm_90'
	@echo 'make bench-peers  install torchft and hivemind for bench/wan.py, each in a .venv-* of its own'
	@echo 'make test-ray     install Ray in .venv-ray, and test narrows.worker.ray there'
	@echo 'make clean        remove builds, caches and run output; environments stay'

install: $(INSTALLED)

demo: $(INSTALLED)
	$(MAIN_JOB)

test: $(INSTALLED)
	$(MAIN_JOB) --steps 100
	.venv/bin/pytest -n 4 --dist worksteal

# mypy does not see the package-dir map of an editable install: it gets a folder with one symlink, `narrows`, instead.
check: $(INSTALLED) build/mypy/narrows
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	cd build/mypy && ../../.venv/bin/mypy --config-file ../../pyproject.toml \
		narrows/protocols narrows/compression narrows/ps narrows/worker narrows/tests narrows/bench narrows/docs
	.venv/bin/python docs/states.py --check

fuzz: $(INSTALLED)
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[fuzz]'
	.venv/bin/python bench/fuzz.py --seconds $(FUZZ_SECONDS)

ptx: $(INSTALLED)
	cd tests && ../.venv/bin/python -m kit.cuda_linked

build/mypy/narrows:
	mkdir -p build/mypy
	ln -sfn ../.. $@

# pip is the last thing that venv installs, so an interrupted one is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo '$(PYTHON) is not Python 3.11 or newer, which Narrows needs: name one with make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv

# Only what a run imports is compiled to bytecode: all of it would be half of an installation's time. The first optimizer of a
# script imports torch._dynamo.
$(INSTALLED): pyproject.toml constraints.txt | .venv/bin/pip
	.venv/bin/python -m pip install --no-compile -c constraints.txt -e '.[bench,cuda,dev]'
	.venv/bin/python -P -m narrows.compression
	.venv/bin/python -P -c 'import torch._dynamo'
	touch $@

examples: .venv-examples/installed
	.venv-examples/bin/pytest tests/examples

bench-peers: .venv-torchft/installed .venv-hivemind/installed

# By the interpreter of .venv: bench/tasks/bytelm.py trains on its library.
.venv-%/installed: pyproject.toml constraints.txt | .venv/bin/pip
	.venv/bin/python -m venv .venv-$*
	.venv-$*/bin/python -m pip install -c constraints.txt -e '.[$*$(WITH_$*)]'
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
