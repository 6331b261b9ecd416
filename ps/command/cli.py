"""The flags of ps-serve. serve.py does the work."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import sys
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from narrows.protocols.config.settings import SHARDS_MAX
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, PLACE, BareGroup, glance_flags, run, run_flags
from narrows.ps.command.console import NAME
from narrows.ps.command.serve import checked, serve


@click.group(cls=BareGroup, context_settings=COMMAND, invoke_without_command=True)
@click.option("--bind", default="tcp://127.0.0.1:5555", show_default=True,
              help="address of shard 0; the port of shard i is i higher")  # fmt: skip
@click.option("--one-port", is_flag=True, help="serve all shards at the port of --bind; a page or metrics at the same address "
              "are served there too")  # fmt: skip
@click.option("--relay-at", default="", metavar="ADDR", help="workers of ps-worker --relay meet at the ps-serve relay at ADDR; "
              "without, at the port of --one-port")  # fmt: skip
@click.option("--relay-key", default="", metavar="FILE", help="a copy of the file that ps-serve relay --key made")
@click.option("--via", default="", metavar="ADDR", help="meet the members in a mailbox, by objects in s3://BUCKET/RUN, "
              "gs://BUCKET/RUN or file:///SHARED/FOLDER, and listen to nobody; needs --keys and --sync local")  # fmt: skip
@run_flags
@click.option(
    "--parent",
    default="",
    help="address of the parent's ps-serve, or its mailbox: this cluster is one worker of it; it pushes updates, or mixes "
    "if the parent runs gossip",
)
@click.option("--parent-timeout", type=click.FloatRange(0.1), default=30.0, show_default=True,
              help="seconds of silence after which the parent counts as lost")  # fmt: skip
@click.option("--keys", default="", help="folder made by ps-serve keys; machines whose key is not in it are refused")
@click.option("--parent-key", default="", help="the key file that ps-serve keys add --role cluster made at the parent; a "
              "standby of this server needs a copy")  # fmt: skip
@click.option("--insecure", is_flag=True, help="allow addresses beyond loopback without keys")
@click.option("--checkpoint-dir", default="", type=PLACE, metavar="DIR", help="folder, or s3://BUCKET/NAME, for checkpoints "
              "and the final model.safetensors; none: keep neither [checkpoints/DATE-TIME]")  # fmt: skip
@click.option("--resume", is_flag=True, help="go on from the newest checkpoint in --checkpoint-dir, if it has one")
@click.option("--run-id", default="", metavar="NAME", help="name of this run: --resume starts an ended run again under its "
              "name, and its workers get the model; under another name an ended run is refused")  # fmt: skip
@click.option("--steps", type=click.IntRange(0), default=0, metavar="N", help="with --resume: go on with a run that has ended "
              "after fewer than N steps")  # fmt: skip
@click.option("--fresh-run", is_flag=True, help="begin a new run in --checkpoint-dir: files of an earlier run are moved to "
              "a folder in it")  # fmt: skip
@click.option("--journal/--no-journal", default=True, show_default=True,
              help="keep each shard's events in memory, so that a killed shard goes on where it was; without, it goes back "
              "to its newest checkpoint")  # fmt: skip
@click.option("--shared-memory/--no-shared-memory", default=True, show_default=True,
              help="large messages between this server and workers of the same machine and user lie in shared memory; without, "
              "they go through a Unix socket")  # fmt: skip
@click.option("--replicas", type=click.IntRange(0, 1), default=0, show_default=True,
              help="number of standbys that may copy this server: ps-serve --standby on another machine")  # fmt: skip
@click.option("--standby", default="", metavar="ADDR",
              help="copy the server at ADDR and take its place when its machine is lost; the run's flags come from "
              "it")  # fmt: skip
@click.option("--join", default="", metavar="ADDR",
              help="run --shards shards of the server at ADDR on this machine; Ctrl-C moves their keys back")  # fmt: skip
@click.option("--plan", default="", metavar="FILE", help="start the servers that this host has in the plan "
              "of ps-plan, with their flags")  # fmt: skip
@click.option("--host", default="", help="name of this machine in --plan [its hostname]")
@click.option("--ready-file", default="", help="JSON file that is written once workers can join")
@click.option(
    "--record",
    default="",
    type=PLACE,
    metavar="FILE",
    help="write events of the run and figures of its workers to this file, or s3://BUCKET/NAME, a JSON object a line",
)
@click.option("--trace", type=click.IntRange(0), default=0, metavar="N", help="add events of every Nth clock to --record, "
              "for ps-plot --trace; 0: none [0]")  # fmt: skip
@glance_flags
@click.option("--print", default="", metavar="FORMAT", help="print a job file for a manager, filled in from the other flags: "
              "slurm, jobset, kubeflow, dockerfile, sky, dstack, ray or compose")  # fmt: skip
@click.version_option(package_name="narrows", allow_from_autoenv=False)
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> int:
    """Serve the model of one cluster: N shards in N processes, one sync mode.

    Each flag has an environment variable NARROWS_<FLAG>, for example NARROWS_BIND; the flag wins. The server ends with
    its last worker. Ctrl-C writes a checkpoint and ends the server. SIGUSR1 prints all levels of the run.
    """
    if context.invoked_subcommand is not None:
        return 0
    form = flags.pop("print")
    told = {name for name in flags if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if form:
        from narrows.ps.command.managers.formats import printed

        click.echo(printed(form, told, partial(checked, parent="", open_to_all=False), **flags), nl=False)
        return 0
    plan, host = flags.pop("plan"), flags.pop("host")
    if plan:
        from narrows.ps.command import stage_servers

        taken = (
            "keys",
            "checkpoint_dir",
            "resume",
            *stage_servers.OF_EACH,
            "journal",
            "shared_memory",
            "ready_file",
            *stage_servers.OF_ROOT,
        )
        if more := sorted(told - {"plan", "host", *taken}):
            raise UsageError(f"--{more[0].replace('_', '-')}: the plan says what servers do; leave it out")
        return stage_servers.serve(plan, host, **{name: flags[name] for name in taken})
    return serve(**flags)


@command.command()
@click.argument("count", type=click.IntRange(1, SHARDS_MAX))
@click.option("--at", default="tcp://127.0.0.1:5555", show_default=True, help="address of the ps-serve")
def shards(count: int, at: str) -> None:
    """Cut the keys of a ps-serve on this machine over COUNT shards, and wait until that is done. Training goes on."""
    from narrows.protocols.addresses import parse_address
    from narrows.ps.command.reshard import ask

    click.echo(ask(parse_address("--at", at)[1], count))


@command.command()
@click.option("--json", "as_json", is_flag=True, help="print a JSON object a line instead of a table")
def runs(as_json: bool) -> None:
    """List the runs of this user on this machine: each ps-serve, and each ps-worker that embeds a server."""
    from narrows.ps.dashboard.run_registry import runs as found
    from narrows.ps.dashboard.run_table import lines, table

    click.echo("\n".join(lines(found()) if as_json else table(found())))


@command.command()
@click.option(
    "--bind", default="tcp://0.0.0.0:5556", show_default=True, help="address that workers of all places reach"
)
@click.option("--key", required=True, metavar="FILE", help="file of the secret that the relay shares with ps-serve "
              "--relay-key; made if there is none")  # fmt: skip
def relay(bind: str, key: str) -> int:
    """Serve a relay until Ctrl-C: workers of gossip that cannot dial each other, as behind NATs, meet there.

    It leads to workers of runs that have a copy of the key, and nowhere else. It reads nothing of what it moves.
    """
    from narrows.ps.command.relay import serve_relay

    return serve_relay(bind, key)


@command.group()
def keys() -> None:
    """Make keys: only machines with a key can join, and all messages are encrypted."""


FOLDER = click.option(
    "--keys", "folder", required=True, envvar="NARROWS_KEYS", metavar="DIR", help="folder of the server's keys"
)


@keys.command()
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Make the keys of a server in a new folder DIR, for ps-serve --keys DIR."""
    from narrows.protocols.runtime.network.key_files import make

    make(folder)
    click.echo(
        f"{folder} has the keys of a server. For each machine: ps-serve keys add NAME --keys {shlex.quote(folder)}"
    )


@keys.command()
@click.argument("name")
@FOLDER
@click.option("--role", type=click.Choice(["worker", "cluster"]), default="worker", show_default=True,
              help="worker: for ps-worker --key; cluster: for ps-serve --parent-key")  # fmt: skip
def add(name: str, folder: str, role: str) -> None:
    """Make a key for the machine NAME, and print the path of its file. A running server accepts the key at once.

    Give NAME this file and no other. If the output goes to a file (ps-serve keys add NAME > NAME.key), that file is the
    key.
    """
    from narrows.protocols.runtime.network.key_files import add as added

    flag = "ps-worker --key" if role == "worker" else "ps-serve --parent-key"
    with contextlib.suppress(OSError, ValueError):  # there is no stdout, or stdout has no file descriptor
        output = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(output).st_mode):
            os.fchmod(output, 0o600)
            path = added(folder, name, role)
            click.echo(path.read_text(), nl=False)
            return click.echo(
                f"{path} and this output are the key of {name}, for {flag}: send it over a safe channel", err=True
            )
    path = added(folder, name, role)
    click.echo(f"{path}\nsend this file to {name} over a safe channel, for {flag} {path.name}; it is a secret")


@keys.command()
@click.argument("name")
@FOLDER
def revoke(name: str, folder: str) -> None:
    """Revoke the key of NAME. A running server refuses its connections within a second."""
    from narrows.protocols.runtime.network.key_files import revoke as revoked

    revoked(folder, name)
    click.echo(f"the key of {name} is revoked")


@keys.command("list")
@FOLDER
def names(folder: str) -> None:
    """Print the names whose keys the server accepts."""
    from narrows.protocols.runtime.network.key_files import listed, server_key

    server_key(folder)
    click.echo("\n".join(listed(folder)) or "nobody")


def main() -> None:
    run(command, NAME)


if __name__ == "__main__":
    main()
