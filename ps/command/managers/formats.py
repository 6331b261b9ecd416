"""ps-serve --print FORMAT: the file that a manager takes, filled in from the other flags.

FORMATS is the one table. Each function takes a Recipe and returns the file, and has the names of the flags that go along: one
that was given and is not among them is refused. tests/system/test_manager_formats.py hands each printed command to the
parsers of its flags.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection
from textwrap import dedent, indent
from typing import Any

from narrows.protocols.addresses import ANY_HOST, ANY_HOSTS, parse_address
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import RUN_FLAGS, given
from narrows.ps.command.managers.kubernetes import jobset, kubeflow
from narrows.ps.command.managers.run_commands import (
    END_S,
    IMAGE,
    PORT,
    READY,
    REGISTRY,
    SCRIPT,
    RunCommands,
    ShellWord,
    listed,
    shell,
)
from narrows.ps.dashboard.run_watch import site_address


def slurm(recipe: RunCommands) -> str:
    """A heterogeneous job: the server on the node of the batch script, the workers as one step of the second component."""
    workers = f"{recipe.workers} worker{'s' * (recipe.workers > 1)}"
    serve = shell(
        recipe.serve(ShellWord("$folder"), ShellWord("$SLURM_JOB_ID"), "--ready-file", ShellWord("$folder.ready"))
    )
    work = shell(recipe.work(ShellWord("$server"), ShellWord("$folder"), script=[ShellWord("$@")], told=True))
    return f"""#!/bin/bash
# Narrows on Slurm: a server, and {workers}. Run it with: sbatch FILE {SCRIPT[0]} ARGS...
# 120 s before its time is over the server writes a checkpoint, and the job is queued again: it goes on from there.
{recipe.note()}
#SBATCH --job-name=narrows
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{END_S}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={recipe.shards + 1}
#SBATCH hetjob
#SBATCH --ntasks={recipe.workers}
# Add what a worker needs: #SBATCH --gpus-per-task=1

folder=narrows-$SLURM_JOB_ID
again= stopped= code=0
rm -f "$folder.ready"
stop() {{  # once: a second SIGTERM ends it without a checkpoint
    [ -n "$stopped" ] || kill -TERM "$serve" 2>/dev/null
    stopped=1
}}
within() {{  # so many seconds this process ends; a signal is heard meanwhile
    timeout "$1" tail --pid="$2" -f /dev/null &
    wait "$!"
}}

{serve} &
serve=$!
trap 'again=1; stop' USR1
trap 'stop' TERM  # scancel: without a requeue
until [ -e "$folder.ready" ] || [ -n "$again" ] || ! kill -0 "$serve" 2>/dev/null; do sleep 1; done
if [ -e "$folder.ready" ]; then
    server=$(sed 's/.*"address": "\\([^"]*\\)".*/\\1/' "$folder.ready")
    srun --het-group=1 {work} &
    workers=$!
    wait -n "$serve" "$workers"  # until one of them ends, or a signal comes
    code=$?
    # A preemption sends SIGTERM to the workers alone, and a job that has ended by itself is not queued again for it.
    if [ -z "$stopped" ] && [ "$code" = 143 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
        again=1
        stop
    fi
    within 60 "$serve" || stop  # without workers it ends by itself where one has finished
    wait "$serve" || code=$?
    # Scripts may go on after the server. srun passes on no SIGTERM: it kills them.
    within "$([ -z "$stopped" ] && echo 600 || echo 20)" "$workers" || kill -TERM "$workers"
    wait "$workers" || code=$?
else
    wait "$serve" || code=$?
fi
rm -f "$folder.ready"
if [ -n "$again" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


def dockerfile(recipe: RunCommands) -> str:
    return f"""# Build it in the folder of Narrows, with {SCRIPT[0]} in it: docker build -f FILE -t {IMAGE} .
# For a cluster: docker tag {IMAGE} {REGISTRY}/{IMAGE} && docker push {REGISTRY}/{IMAGE}, with a registry of yours.
# Narrows needs no compiler. A script that calls torch.compile does: RUN apt-get update && apt-get install -y g++
FROM python:3.12-slim
WORKDIR /narrows
COPY pyproject.toml README.md LICENSE ./
COPY compression compression
COPY protocols protocols
COPY ps ps
COPY worker worker
RUN pip install --no-cache-dir . && python -P -m narrows.compression
# What the script needs, by name: "COPY . ." would take keys and checkpoints into the image.
WORKDIR /job
COPY {SCRIPT[0]} ./
# It runs as any user, and where nothing but /tmp can be written.
ENV HOME=/tmp
USER 1000:1000
"""


def _everywhere(recipe: RunCommands, server: str, rank: str, run_id: str) -> str:
    """One script for all machines: that of rank 0 has the server, too. `run_id`: by which the manager knows the run, also when
    it starts it again."""
    folder = ShellWord(f"/checkpoints/{run_id}")
    head = shell(recipe.serve(folder, ShellWord(run_id), keys="/keys"))
    work = shell(recipe.work(ShellWord("$server"), folder, keys="/keys"))
    return f"""server={server}
if [ "{rank}" = 0 ]; then
  {head} &
fi
{work} || exit
wait  # for the server, which ends with its last worker
"""


def sky(recipe: RunCommands) -> str:
    keys = f"  /keys: {json.dumps(recipe.keys)}\n" if recipe.keys else ""
    run = _everywhere(recipe, '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "$SKYPILOT_NODE_RANK", "$SKYPILOT_TASK_ID")
    return f"""# Narrows on SkyPilot: sky jobs launch FILE. A job that is recovered goes on from its own folder in
# /checkpoints; another job is another run.
{recipe.note()}
name: narrows
num_nodes: {recipe.workers}
workdir: .
file_mounts:
  /checkpoints: {{name: narrows-checkpoints, mode: MOUNT_CACHED}}  # a bucket of this name
{keys}setup: |
  pip install . && python -P -m narrows.compression
run: |
{indent(run, "  ")}"""


def dstack(recipe: RunCommands) -> str:
    keys = f"files: [{{local_path: {json.dumps(recipe.keys)}, path: /keys}}]\n" if recipe.keys else ""
    run = "chmod -R go= /keys\n" if recipe.keys else ""
    run += _everywhere(recipe, "$DSTACK_MASTER_NODE_IP", "$DSTACK_NODE_RANK", "$DSTACK_RUN_ID")
    return f"""# Narrows on dstack: dstack apply -f FILE, on a fleet with placement: cluster. Each run has a folder of its own.
{recipe.note()}
type: task
name: narrows
nodes: {recipe.workers}
python: "3.12"
repos: [.]
{keys}volumes:
- {{instance_path: /narrows, path: /checkpoints}}  # a network volume would outlive the instance
commands:
- pip install . && python -P -m narrows.compression
- |
{indent(run, "  ")}"""


def ray(recipe: RunCommands) -> str:
    flags = {"workers": (1, recipe.workers), "shards": recipe.shards, "keys": recipe.keys or None}
    flags |= {"insecure": None if recipe.keys or recipe.host else True, "host": recipe.host or None}
    flags |= {"journal": recipe.journal == "--journal" if recipe.journal else None}
    flags |= {name: value for name, value in recipe.run.items() if name not in flags}
    told = "".join(f"    {name}={value!r},\n" for name, value in flags.items() if value is not None)
    told += '    checkpoint_dir="/shared/narrows",  # a folder that all nodes see\n'
    return f'''"""Narrows on Ray: python FILE. It runs where `ray.init` finds the cluster."""

import ray
from narrows.worker.ray import train

ray.init(address="auto")
result = train(
    {SCRIPT[0]!r},
{told})
print(result)
'''


COMPOSED = (ShellWord("/run/narrows/${RUN_ID:-first}"), ShellWord("${RUN_ID:-first}"))  # folder and name of a run


def compose(recipe: RunCommands) -> str:
    """Two cities on one machine: a network each, and one between their servers and the one above. A city runs
    bsp: its server has the state of the optimizer."""
    above = recipe.serve(*COMPOSED, "--ready-file", READY, run=dict(recipe.run) | {"workers": 2, "shards": recipe.shards},
                         keys="/keys", inside=True)  # fmt: skip
    city = {"workers": recipe.workers, "shards": recipe.shards, "sync": "bsp"}
    key = ["--parent-key", "/keys/{}.key"] if recipe.keys else ["--insecure"]
    parent = ["--parent", f"tcp://above:{recipe.port}", *key]
    names = ("leipzig", "jena")
    disk = [("./narrows", "/run/narrows"), *([(recipe.keys, "/keys")] if recipe.keys else [])]
    sites = dict.fromkeys(f"{host}:{port}:{port}" for host, port in recipe.sites.values())
    cities = ""
    for name in names:
        inside = RunCommands(ANY_HOST, recipe.port, recipe.workers, recipe.shards, city, "", journal=recipe.journal)
        serve = inside.serve(*COMPOSED, "--ready-file", READY, *(word.format(name) for word in parent), run=city)
        serve += [] if "--insecure" in serve else ["--insecure"]  # inside a city, where only its workers are
        work = inside.work(name, "", "-n", str(recipe.workers))
        own = [(f"{recipe.keys}/{name}.key", f"/keys/{name}.key")] if recipe.keys else []
        cities += _service(name, serve, [name, "between"], own, [], "above")
        cities += _service(f"{name}-workers", work, [name], [], [], name)
    together = " && ".join(
        f"ps-serve keys add {name} --role cluster --keys {shlex.quote(recipe.keys)}" for name in names
    )
    note = (
        f"# Keys, once: ps-serve keys init {shlex.quote(recipe.keys)} && {together}" if recipe.keys else recipe.note()
    )
    return dedent(f"""\
        # Two cities on one machine: docker compose -f FILE up. It needs the image of --print dockerfile.
        # It goes on with the run that RUN_ID names; RUN_ID=second docker compose -f FILE up begins another one.
        {note}
        services:
        """) + _service("above", above, ["between"], disk, [*sites], "") + cities + dedent("""\
        networks:
          between: {}
          leipzig: {}
          jena: {}
        """)  # fmt: skip


def _service(
    name: str, command: list[str], networks: list[str], volumes: list[tuple[str, str]], ports: list[str], after: str
) -> str:
    lines = [
        f"{name}:",
        f"  image: {IMAGE}",
        '  user: "0:0"',  # for ./narrows, which the engine makes, and for keys of whoever starts it
        f"  command: {listed(command, '$')}",
        f"  networks: {listed(networks)}",
    ]
    lines += ["  volumes:"] if volumes else []
    for source, target in volumes:  # not SOURCE:TARGET, for a path may have a colon
        where = f"type: bind, source: {json.dumps(source.replace('$', '$$'))}, target: {target}"
        more = "read_only: true" if target.startswith("/keys") else "bind: {create_host_path: true}"
        lines.append(f"  - {{{where}, {more}}}")
    lines += [f"  ports: {listed(ports, '$')}"] if ports else []
    if after:
        lines.append(f"  depends_on: {{{after}: {{condition: service_healthy}}}}")
    if READY in command:
        lines += [
            f"  stop_grace_period: {END_S}s",
            f"  healthcheck: {{test: [CMD, test, -e, {READY}], interval: 2s, retries: 60}}",
        ]
    return indent("\n".join(lines), "  ") + "\n"


ANY_PORT = {"slurm"}  # their workers read the address of the server: two jobs may share a node
SERVER = {"bind", "keys", "insecure", "resume", "journal", *(name for name, *_ in RUN_FLAGS)}
SITES = {"dashboard", "metrics"}  # where somebody can look at them

FORMATS: dict[str, tuple[Callable[[RunCommands], str], Collection[str]]] = {
    "slurm": (slurm, SERVER | SITES),
    "jobset": (jobset, SERVER | SITES),
    "kubeflow": (kubeflow, SERVER | SITES),
    "dockerfile": (dockerfile, ()),
    "sky": (sky, SERVER),
    "dstack": (dstack, SERVER),
    "ray": (ray, SERVER),
    "compose": (compose, SERVER | SITES),
}


Check = Callable[[Settings, str], object]


def printed(form: str, told: Collection[str], check: Check, bind: str, keys: str, insecure: bool, **flags: Any) -> str:
    """Return the file that a manager takes.

    Args:
        form: a name of FORMATS.
        told: the flags that were given.
        check: gets the settings and the address to bind, as ps-serve does before it serves; raises UsageError.
        bind: the address of shard 0.
        keys: the folder of keys, "" without.
        insecure: no keys are needed.
        flags: all other flags of ps-serve.

    Raises:
        UsageError: one sentence that names the flag.
    """
    if form not in FORMATS:
        raise UsageError(f"--print {form}: the formats are {', '.join(FORMATS)}")
    write, taken = FORMATS[form]
    for flag in ("--" + name.replace("_", "-") for name in sorted({*told} - {*taken})):
        raise UsageError(f"--print {form}: leave out {flag}: that file is printed without it, and you may add it")
    run = given(flags)
    settings = Settings(**run).validated()
    host, port = parse_address("--bind", bind, any_port=True)
    check(settings, f"tcp://{ANY_HOST}:{port or PORT}")
    sites = {f"--{name}": _site(name, flags[name], bool(keys or insecure)) for name in sorted(SITES) if flags[name]}
    known = host if "bind" in told and host not in ANY_HOSTS else ""
    folder = os.path.abspath(keys) if keys else ""
    for flag, value in {"--keys": folder, **{flag: site for flag, (site, _) in sites.items()}}.items():
        if not value.isprintable():  # a comment ends with its line
            raise UsageError(f"{flag} {value!r}: a character of it cannot be printed; choose another name")
    journal = ("--journal" if flags["journal"] else "--no-journal") if "journal" in told else ""
    given_port = port if "bind" in told else 0
    chosen = given_port or (0 if form in ANY_PORT else PORT)
    return write(RunCommands(known, chosen, settings.workers, settings.shards, run, folder, True, sites, journal))


def _site(name: str, address: str, trusted: bool) -> tuple[str, int]:
    host, port = site_address(f"--{name}", address, trusted)
    if not port:
        raise UsageError(f"--{name} {address}: name a port, for who looks there must know it")
    return host, port
