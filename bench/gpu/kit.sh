#!/usr/bin/env bash
# Makes .gpu/ at the root of the checkout (ignored by git, 22 MiB): the wheels to carry to a GPU machine that has no package
# index, but Python 3.12 with torch 2.11+cu130, numba, llvmlite, msgpack, click, safetensors, sortedcontainers, pytest and CUDA 13.
#
#     make gpu-kit                                           # here; the wheels are those of the index that pip is configured with
#     bash .gpu/run.sh [PART ...]                            # there, in the root of the checkout: 14 minutes, results as they come
#     TRY_PYTHON=PYTHON3.12 bash .gpu/run.sh --try           # what runs on the CPU shows that the kit is whole
#
# PYTHON=... names another interpreter with pip than .venv's. bench/gpu/h100.md has what an H100 printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .gpu/wheels
platforms=()
for tag in manylinux2014 manylinux_2_17 manylinux_2_26 manylinux_2_27 manylinux_2_28; do platforms+=(--platform "${tag}_x86_64"); done
"${PYTHON:-.venv/bin/python}" -m pip download --quiet --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d .gpu/wheels \
  'pyzmq>=26' 'lz4>=4.3' 'rich>=13' 'numba-cuda>=0.30,<0.31' 'numpy<2.5' 'prometheus_client>=0.20' \
  'pytest-timeout>=2.3' 'pytest-xdist>=3.6' execnet 'hypothesis>=6.100'
printf '#!/usr/bin/env bash\nexec bash "$(dirname "$0")/../bench/gpu/run.sh" "$@"\n' >.gpu/run.sh
git log --oneline -1 >.gpu/commit
du -sh .gpu
