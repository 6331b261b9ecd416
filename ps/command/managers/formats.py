"""ps-serve --print FORMAT: the file that a manager takes.

How it works

1. `printed` checks the flags of ps-serve, and makes a `RunCommands` of them: the commands of the server and its
   workers.
2. The format's function in FORMATS makes a value for each placeholder of a template in templates/, and `filled` fills
   the values in. All text that does not depend on flags is in the template.

FORMATS names for each function the flags that the format supports. `printed` refuses any other flag that the user has
given. tests/system/test_manager_formats.py hands each printed command to the parser of its flags.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection
from typing import Any

from narrows.protocols.addresses import ANY_HOST, ANY_HOSTS, parse_address
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import RUN_FLAGS, given
from narrows.ps.command.managers.kubernetes import jobset, kubeflow
from narrows.ps.command.managers.run_commands import (
    PORT,
    READY,
    SCRIPT,
    RunCommands,
    ShellWord,
    filled,
    listed,
    shell,
)
from narrows.ps.dashboard.run_watch import site_address


def slurm(recipe: RunCommands) -> str:
    """Return a heterogeneous job: the server on the batch script's node, the workers as a step of component two."""
    serve = recipe.serve(ShellWord("$folder"), ShellWord("$SLURM_JOB_ID"), "--ready-file", ShellWord("$folder.ready"))
    work = recipe.work(ShellWord("$server"), ShellWord("$folder"), script=[ShellWord("$@")], told=True)
    return filled(
        "slurm",
        workers=recipe.workers,
        plural="s" * (recipe.workers > 1),
        note=recipe.note(),
        cpus=recipe.shards + 1,
        serve=shell(serve),
        work=shell(work),
    )


def dockerfile(recipe: RunCommands) -> str:
    return filled("dockerfile")


def _every_machine(recipe: RunCommands, server: str, rank: str, run_id: str) -> str:
    """Return one shell script for all machines. The machine of rank 0 runs the server too.

    Args:
        recipe: the commands.
        server: the shell expression for the server's host.
        rank: the shell expression for the rank of the machine.
        run_id: the manager's variable that names the run, the same when the manager starts the run again.
    """
    folder = ShellWord(f"/checkpoints/{run_id}")
    serve = shell(recipe.serve(folder, ShellWord(run_id), keys="/keys"))
    work = shell(recipe.work(ShellWord("$server"), folder, keys="/keys"))
    return filled("every_machine", server=server, rank=rank, serve=serve, work=work)


def sky(recipe: RunCommands) -> str:
    keys = f"/keys: {json.dumps(recipe.keys)}" if recipe.keys else ""
    run = _every_machine(recipe, '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "$SKYPILOT_NODE_RANK", "$SKYPILOT_TASK_ID")
    return filled("sky", note=recipe.note(), workers=recipe.workers, keys=keys, run=run)


def dstack(recipe: RunCommands) -> str:
    keys = f"files: [{{local_path: {json.dumps(recipe.keys)}, path: /keys}}]" if recipe.keys else ""
    run = "chmod -R go= /keys\n" if recipe.keys else ""
    run += _every_machine(recipe, "$DSTACK_MASTER_NODE_IP", "$DSTACK_NODE_RANK", "$DSTACK_RUN_ID")
    return filled("dstack", note=recipe.note(), workers=recipe.workers, keys=keys, run=run)


def ray(recipe: RunCommands) -> str:
    flags = {"workers": (1, recipe.workers), "shards": recipe.shards, "keys": recipe.keys or None}
    flags |= {"insecure": None if recipe.keys or recipe.host else True, "host": recipe.host or None}
    flags |= {"journal": recipe.journal == "--journal" if recipe.journal else None}
    flags |= {name: value for name, value in recipe.run.items() if name not in flags}
    arguments = "\n".join(f"{name}={value!r}," for name, value in flags.items() if value is not None)
    return filled("ray", script=repr(SCRIPT[0]), arguments=arguments)


COMPOSED = (ShellWord("/run/narrows/${RUN_ID:-first}"), ShellWord("${RUN_ID:-first}"))  # folder and name of a run
CITIES = ("leipzig", "jena")


def compose(recipe: RunCommands) -> str:
    """Return two cities on one machine: a network for each city, and one between their servers and the root.

    A city runs bsp, so its server has the state of the optimizer. Containers run as root, because the container engine
    makes ./narrows for root, and the keys belong to the user who starts it.
    """
    serve = recipe.serve(*COMPOSED, "--ready-file", READY, run=dict(recipe.run) | {"workers": 2, "shards": recipe.shards},
                         keys="/keys", inside=True)  # fmt: skip
    sites = dict.fromkeys(f"{host}:{port}:{port}" for host, port in recipe.sites.values())
    note = recipe.note()
    if recipe.keys:
        folder = shlex.quote(recipe.keys)
        add = (f"ps-serve keys add {city} --role cluster --keys {folder}" for city in CITIES)
        note = " && ".join((f"# Keys, once: ps-serve keys init {folder}", *add))
    return filled(
        "compose",
        note=note,
        serve=listed(serve, "$"),
        keys=_key_mount(recipe.keys, "/keys") if recipe.keys else "",
        ports=f"ports: {listed([*sites], '$')}" if sites else "",
        cities="".join(_city(recipe, city) for city in CITIES),
    )


def _city(recipe: RunCommands, city: str) -> str:
    """Return the services of one city: its server and its workers."""
    run = {"workers": recipe.workers, "shards": recipe.shards, "sync": "bsp", "name": recipe.run.get("name")}
    inside = RunCommands(ANY_HOST, recipe.port, recipe.workers, recipe.shards, run, "", journal=recipe.journal)
    key = f"/keys/{city}.key"
    above = ["--parent", f"tcp://above:{recipe.port}", *(["--parent-key", key] if recipe.keys else [])]
    serve = inside.serve(*COMPOSED, "--ready-file", READY, *above, "--insecure", run=run)  # only its workers reach it
    work = inside.work(city, "", "-n", str(recipe.workers))
    return filled(
        "compose_city",
        city=city,
        serve=listed(serve, "$"),
        work=listed(work, "$"),
        keys=f"volumes:\n{_key_mount(f'{recipe.keys}/{city}.key', key)}" if recipe.keys else "",
    )


def _key_mount(source: str, target: str) -> str:
    """Return a volume of keys, in the long form: in SOURCE:TARGET a path could not have a colon."""
    source_json = json.dumps(source.replace("$", "$$"))
    return f"- {{type: bind, source: {source_json}, target: {target}, read_only: true}}"


ANY_PORT = {"slurm"}  # formats whose workers read the server's address, so that two jobs may share a node
SERVER = {"bind", "keys", "insecure", "resume", "journal", *(name for name, *_ in RUN_FLAGS)}
SITES = {"dashboard", "metrics"}  # for formats whose users can reach the server's port

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
        form: a name in FORMATS.
        told: the names of the flags that the user has given.
        check: checks the settings and the address to bind, as ps-serve does before it serves; raises UsageError.
        bind: the address of shard 0.
        keys: the folder of keys, "" for none.
        insecure: the user allows a run without keys.
        flags: all other flags of ps-serve.

    Raises:
        UsageError: a flag does not go with this format; the sentence names the flag.
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
        raise UsageError(f"--{name} {address}: name a port, so that others can find it")
    return host, port
