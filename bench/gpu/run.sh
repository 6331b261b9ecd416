#!/usr/bin/env bash
# Checks and times this checkout on a GPU machine that has the kit (see kit.sh): bash .gpu/run.sh [--try] [PART ...] [FLAG ...]
#
# PART and FLAG are those of bench/gpu/device.py; without a PART all run, in the order of their worth, within WITHIN=840 seconds.
# --try: TRY_PYTHON runs on the CPU what can run there. The log and the results, a JSON line each, are in $OUT (/tmp/gpu-out by
# default) as they come. The exit code is 1 if a part failed or missed what was wanted.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 9
top=$(pwd); out=${OUT:-/tmp/gpu-out}; venv=/tmp/gpu-venv
mkdir -p "$out"; rm -f "$out/results.jsonl"
try=; [ "${1:-}" = --try ] && { try=1; shift; }
base=$(command -v python3); [ -n "$try" ] && base=${TRY_PYTHON:-python3.12}

# An environment of the kit's wheels, this checkout as `narrows`, and the packages of the machine's own Python behind both.
if [ "$(cat "$venv/ready" 2>/dev/null)" != "$base $top" ]; then
  rm -rf "$venv"; "$base" -m venv --without-pip "$venv" || exit 9
  purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'
  site=$("$venv/bin/python" -c "$purelib"); old=$("$base" -c "$purelib")
  for wheel in .gpu/wheels/*.whl; do "$venv/bin/python" -m zipfile -e "$wheel" "$site" >/dev/null || exit 9; done
  mkdir -p "$site/narrows" "$site/narrows-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: narrows\nVersion: 0\n' >"$site/narrows-0.dist-info/METADATA"
  for folder in protocols compression ps worker; do ln -sfn "$top/$folder" "$site/narrows/$folder"; done
  echo "$old" >"$site/zz-base.pth"; [ -e "$old/nvidia" ] && ln -sfn "$old/nvidia" "$site/nvidia"
  sed -n '/^\[project.scripts\]/,/^$/s/^\([a-z-]*\) = "\(.*\):main"$/\1 \2/p' pyproject.toml | while read -r name module; do
    printf '#!%s\nimport sys\nfrom %s import main\nsys.exit(main())\n' "$venv/bin/python" "$module" >"$venv/bin/$name"
    chmod +x "$venv/bin/$name"
  done
  echo "$base $top" >"$venv/ready"
fi
[ -z "${CUDA_HOME:-}" ] && [ -d /usr/local/cuda ] && export CUDA_HOME=/usr/local/cuda
export PYTHONUNBUFFERED=1 PATH="$venv/bin:$PATH${CUDA_HOME:+:$CUDA_HOME/bin}"

versions='import importlib.metadata as m, torch
print(*(f"{n} {m.version(n)}" for n in ("numpy", "numba", "numba-cuda", "cuda-bindings", "torch")), "GPU", torch.cuda.is_available())'
device=(); [ -n "$try" ] && device=(--device host)
{
  nvidia-smi -L 2>/dev/null; cat .gpu/commit; python -c "$versions"
  python bench/gpu/device.py --within "${WITHIN:-840}" --out "$out/results.jsonl" "${device[@]}" "$@"
  code=$?; echo "all done at $SECONDS s"; exit $code
} 2>&1 | tee "$out/log.txt"
