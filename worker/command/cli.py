"""The command line of ps-worker. `Launcher` starts the workers, `ScriptCheck` is --check."""

from __future__ import annotations

from typing import Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, PLACE, Bare, glance_flags, run, run_flags
from narrows.worker.command.launcher import Launcher
from narrows.worker.command.options import checked
from narrows.worker.runtime.config import TEACHER_CODING


@click.command(cls=Bare, context_settings=COMMAND | {"allow_interspersed_args": False})
@click.option("--server", "--via", "server", default=None, help="the tcp://HOST:PORT that ps-serve printed, and after "
              "commas its standbys, or its mailbox, as s3://BUCKET/RUN; '' embeds a server [the server that a manager of "
              "several machines names, else embedded]")  # fmt: skip
@click.option("-n", "--nproc", type=int, default=1, help="copies of the script on this machine [1]")
@click.option("--group", is_flag=True, help="the copies are one worker: each has a slice of the model, and their mean "
              "gradient is the worker's")  # fmt: skip
@click.option("--restarts", type=int, default=0, help="how often a failed worker is started again; with --group, all "
              "copies [0]")  # fmt: skip
@click.option("--device", default="auto", help="device of the script: auto, cpu or cuda[:i]; with auto and cuda each copy "
              "has one GPU [auto]")  # fmt: skip
@click.option("--rank-variables", is_flag=True, help="set RANK, GLOBAL_RANK, LOCAL_RANK and WORLD_SIZE for the script; "
              "libraries that find them may start torch.distributed")  # fmt: skip
@click.option(
    "--record",
    default="",
    type=PLACE,
    metavar="FILE",
    help="write events and figures of the workers to this file or s3://BUCKET/NAME, a JSON object a line",
)
@click.option("--trace", type=click.IntRange(0), default=0, metavar="N", help="add events of every Nth clock to --record, "
              "for ps-plot --trace; 0: none [0]")  # fmt: skip
@click.option("--key", default="", help="the key file that ps-serve keys add made for this machine [none]")
@click.option("--plan", default="", metavar="FILE", help="start the workers, or the stages and replicas, that the plan has for "
              "this host")  # fmt: skip
@click.option("--host", default="", help="name of this machine in --plan [its hostname]")
@click.option("--connect-timeout", type=float, default=30.0, help="seconds within which a server must answer [30]")
@click.option(
    "--server-timeout", type=float, default=30.0, help="seconds of silence after which a server counts as lost [30]"
)
@click.option("--relay", is_flag=True, help="under --sync gossip: peers cannot dial this machine, as behind a NAT; they reach "
              "its workers through the run's relay")  # fmt: skip
@click.option("--teacher", default="", metavar="ADDR", help="the tcp://HOST:PORT of a ps-teach, and of others after commas: "
              "the script asks them for soft targets [none]")  # fmt: skip
@click.option("--teacher-key", default="", metavar="FILE", help="the key file that ps-serve keys add made on the teacher's "
              "machine; one for each teacher after commas, or one for all [none]")  # fmt: skip
@click.option("--teacher-lost", type=click.Choice(["wait", "go-on"]), default="wait", help="while no teacher is there: wait "
              "for one, or train without soft targets [wait]")  # fmt: skip
@click.option("--teacher-coding", default=TEACHER_CODING, metavar="SPEC", help="how many classes of a prediction the teacher "
              f"sends, and how it codes them: top:K+int8, +int4 or +fp16 [{TEACHER_CODING}]")  # fmt: skip
@click.option("--skip-limit", type=int, default=50, help="skip steps whose gradient is not finite, and end the worker after "
              "this many in a row [50]")  # fmt: skip
@click.option("--checkpoint-dir", default="", type=PLACE, metavar="DIR", help="folder, or s3://BUCKET/NAME, for the "
              "optimizer states of workers and the checkpoints of an embedded server [none]")  # fmt: skip
@click.option("--resume", is_flag=True, help="go on from the newest checkpoint in --checkpoint-dir, if it has one")
@click.option("--run-id", default="", metavar="NAME", help="for the embedded server, as in ps-serve: --resume starts an ended "
              "run again under its name alone")  # fmt: skip
@click.option("--steps", type=click.IntRange(0), default=0, metavar="N", help="with --resume: go on with a run that has ended "
              "after fewer than N steps")  # fmt: skip
@click.option("--fresh-run", is_flag=True, help="begin a new run in --checkpoint-dir: files of an earlier run are moved to "
              "a folder in it")  # fmt: skip
@click.option("--fresh", is_flag=True, help="start each worker in a new interpreter; else workers are forked from a process "
              "that has imported torch")  # fmt: skip
@click.option(
    "--check",
    is_flag=True,
    help="run two steps of the script in two workers on this machine, and print its faults",
)
@click.option("--link", default=None, metavar="RATE,DELAY", help="with --check: predict the time of a step on this link, e.g. "
              "100mbit,20ms")  # fmt: skip
@click.option("-m", "module", is_flag=True, help="run a module instead of a script: -m MODULE ARGS...")
@glance_flags
@run_flags
@click.version_option(package_name="narrows", allow_from_autoenv=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|MODULE ARGS...")
def command(check: bool, link: str | None, **flags: Any) -> int:
    """Train SCRIPT.py ARGS... with N workers of a run.

    Each flag has an environment variable NARROWS_<FLAG>, for example NARROWS_SERVER; the flag wins.
    """
    if link and not check:
        raise UsageError("--link: only --check predicts the time of a step; give --check too")
    if not check:
        return Launcher(checked(**flags)).run()
    from narrows.worker.command.script_check import (
        ScriptCheck,  # and Numba, which other commands leave to their children
    )

    return ScriptCheck(link, **flags).run()


def main() -> None:
    run(command, "ps-worker")


if __name__ == "__main__":
    main()
