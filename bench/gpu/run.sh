#!/usr/bin/env bash
# Checks and times this checkout on a GPU machine that has the kit (see kit.sh): bash .gpu/run.sh [--try] [STEP ...]
#
# Steps: facts checks codes launch graph kernels profile start steps modes users, which run by default, in about 8 minutes;
# steps-100M and memcheck run only if they are named. --try runs `facts` and `codes`, or the steps named, with TRY_PYTHON on the
# CPU. After each step all output so far is in $OUT/all.tgz (/tmp/gpu-out by default).
# The exit code is 1 if a step failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 9
top=$(pwd); back=${OUT:-/tmp/gpu-out}; out=/tmp/gpu-work; venv=/tmp/gpu-venv; failed=0
rm -rf "$out"; mkdir -p "$back" "$out"
save() { tar czf "$back/all.tgz" -C "$out" .; }; trap save EXIT
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
export PYTHONUNBUFFERED=1 PATH="$venv/bin:$PATH"

# step SECONDS NAME COMMAND...: one command, whose last lines are printed.
step() {
  local limit=$1 name=$2; shift 2; echo "== $name (at $SECONDS s)"
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1; local rc=$?
  [ $rc = 0 ] || failed=1
  echo "rc $rc in $name"; tail -n "${TAIL:-12}" "$out/$name.txt"; save
}
# one SECONDS NAME COMMAND...: one of several commands at once; `many` waits for them.
one() { local limit=$1 name=$2; shift 2; timeout "$limit" "$@" >"$out/$name.txt" 2>&1 || echo "FAILED $name: rc $?" >>"$out/$name.txt"; }
many() { wait; tail -n 2 "$out/$1"-*.txt; grep -q '^FAILED' "$out/$1"-*.txt && failed=1; save; }

versions='import numpy, numba, torch
print("numpy", numpy.__version__, "numba", numba.__version__, "torch", torch.__version__, "GPU", torch.cuda.is_available())'
small=(); [ -n "$try" ] && small=(--device host --count 100000)
default="facts checks codes launch graph kernels profile start steps modes users"; [ -n "$try" ] && default="facts codes"
for s in ${@:-$default}; do case $s in
  facts) step 40 facts bash -c "{ nvidia-smi -L || true; }; cat .gpu/commit; python -c '$versions'" ;;
  checks)
    for part in scans selection top_of_blocks index_codes randoms value_codings streams odd_streams sampled; do
      (cd tests && one 150 "check-$part" python -m kit.cuda_checks $part) &
    done; many check ;;
  codes) TAIL=60 step 200 codes python bench/gpu/device.py --part codes --rounds 9 "${small[@]}" --out "$out/codes.json" ;;
  launch|graph|kernels|profile) TAIL=45 step 90 "$s" python bench/gpu/probe.py "${small[@]}" "$s" ;;
  start) for n in 1 2; do
      TAIL=2 step 90 "start-$n" ps-worker -n 1 --device cuda --sync ssp --compress topk:0.05+int8 bench/tasks/bytelm.py --steps 20
    done ;;
  steps) step 150 steps python bench/gpu/device.py --part steps --size 9.8M --steps 30 --rounds 5 --out "$out/steps.json" ;;
  steps-100M) step 300 steps-100M python bench/gpu/device.py --part steps --size 100M --steps 12 --rounds 5 --out "$out/steps-100M.json" ;;
  modes)
    for mode in bsp ssp async local gossip; do
      one 80 "mode-$mode" ps-worker -n 2 --device cuda --sync $mode --compress topk:0.05+int8 bench/tasks/bytelm.py --steps 40 &
    done; many mode ;;
  users)
    for kind in amp16 bf16 compile channels two stream; do
      one 80 "user-$kind" ps-worker -n 2 --device cuda --sync ssp --compress topk:0.05+int8 bench/gpu/user.py $kind 60 &
    done; many user ;;
  memcheck) TAIL=5 step 120 memcheck bash -c 'cd tests && compute-sanitizer --tool memcheck python -m kit.cuda_checks scans odd_streams' ;;
  *) echo "$s is no step of run.sh"; failed=1 ;;
esac; done
echo "all done at $SECONDS s"
exit $failed
