"""The command line of ps-worker. `Launcher` starts the workers, `ScriptCheck` is --check."""

from __future__ import annotations

from typing import Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, Bare, glance_flags, run, run_flags
from narrows.worker.command.launcher import Launcher
from narrows.worker.command.options import checked


@click.command(cls=Bare, context_settings=COMMAND | {"allow_interspersed_args": False})
@click.option("--server", default=None, help="tcp://HOST:PORT as ps-serve printed it, and after commas its standbys; '' is an "
              "embedded server [what a manager of several machines says, else embedded]")  # fmt: skip
@click.option("-n", "--nproc", type=int, default=1, help="copies of the script on this machine [1]")
@click.option("--group", is_flag=True, help="the copies are one worker: each has a slice of the model, and a gradient is the "
              "mean of theirs")  # fmt: skip
@click.option("--restarts", type=int, default=0, help="how often a worker that failed is started again, with --group all "
              "copies [0]")  # fmt: skip
@click.option("--device", default="auto", help="auto, cpu or cuda[:i]: what the script sees; by auto and cuda each copy has "
              "one GPU [auto]")  # fmt: skip
@click.option("--rank-variables", is_flag=True, help="set RANK, GLOBAL_RANK, LOCAL_RANK and WORLD_SIZE for the script: "
              "libraries that find them may start torch.distributed")  # fmt: skip
@click.option("--record", default="", help="write one JSON object a line to this file")
@click.option("--key", default="", help="the file that ps-serve keys add made for this machine [none]")
@click.option("--plan", default="", metavar="FILE", help="start the stages and replicas that this host has in the plan")
@click.option("--host", default="", help="name of this machine in --plan [its hostname]")
@click.option("--connect-timeout", type=float, default=30.0, help="seconds until a server must have answered [30]")
@click.option("--server-timeout", type=float, default=30.0, help="seconds of silence until a server is lost [30]")
@click.option("--skip-limit", type=int, default=50, help="a worker skips steps whose gradient is not finite, and ends after "
              "so many in a row [50]")  # fmt: skip
@click.option("--checkpoint-dir", default="", help="where workers keep their optimizers' states, and the embedded server its "
              "checkpoints [none]")  # fmt: skip
@click.option("--resume", is_flag=True, help="go on from the newest checkpoint in --checkpoint-dir, if it has one")
@click.option("--run-id", default="", metavar="NAME", help="as of ps-serve, for the embedded server: with --resume a run that "
              "has ended is given out again under its name alone")  # fmt: skip
@click.option("--steps", type=click.IntRange(0), default=0, metavar="N", help="with --resume: go on with a run that has ended "
              "after fewer than N steps")  # fmt: skip
@click.option("--fresh-run", is_flag=True, help="begin anew in --checkpoint-dir: what an earlier run has left there is "
              "moved to a folder in it")  # fmt: skip
@click.option("--fresh", is_flag=True, help="start each worker in an interpreter of its own; else all are forked from one that "
              "has imported torch")  # fmt: skip
@click.option(
    "--check",
    is_flag=True,
    help="make two steps with two workers on this machine, and say what is wrong with the script",
)
@click.option("--link", default=None, metavar="RATE,DELAY", help="with --check: say how long a step takes on such a link, e.g. "
              "100mbit,20ms")  # fmt: skip
@click.option("-m", "module", is_flag=True, help="run a module instead of a script: -m MODULE ARGS...")
@glance_flags
@run_flags
@click.version_option(package_name="narrows", allow_from_autoenv=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|MODULE ARGS...")
def command(check: bool, link: str | None, **flags: Any) -> int:
    """Train SCRIPT.py ARGS... with N workers of a run.

    Each flag has a variable, NARROWS_<FLAG>, for example NARROWS_SERVER; the flag wins.
    """
    if link and not check:
        raise UsageError("--link says how long a step takes there: give --check too")
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
