"""ps-serve: its flags. The work is done in serve.py."""

from __future__ import annotations

from typing import Any

import click

from narrows.protocols.runtime.flags import COMMAND, run, run_flags
from narrows.ps.command.cluster import NAME
from narrows.ps.command.serve import serve


@click.command(context_settings=COMMAND)
@click.option("--bind", default="tcp://127.0.0.1:5555", show_default=True,
              help="address of shard 0; shard i takes the port i above it")  # fmt: skip
@run_flags
@click.option(
    "--parent",
    default="",
    help="address of a ps-serve above: this cluster is one worker of it; it pushes updates, or mixes "
    "where that one runs gossip",
)
@click.option("--parent-timeout", type=click.FloatRange(0.1), default=30.0, show_default=True,
              help="seconds of silence after which the server above is lost")  # fmt: skip
@click.option("--insecure", is_flag=True, help="allow other than loopback addresses without authentication")
@click.option("--checkpoint-dir", default="", help="where checkpoints and the final model.safetensors go; none: nowhere "
              "[checkpoints/DATE-TIME]")  # fmt: skip
@click.option("--resume", is_flag=True, help="go on from the newest checkpoint in --checkpoint-dir, if it has one")
@click.option("--ready-file", default="", help="written, as JSON, once workers can join")
def command(**flags: Any) -> int:
    """Serve one cluster's model: N shards in N processes, one sync mode.

    Each flag has a variable, NARROWS_<FLAG>, for example NARROWS_BIND; the flag wins. It ends with its last worker; Ctrl-C
    writes a checkpoint and ends it; SIGUSR1 prints all levels of the run.
    """
    return serve(**flags)


def main() -> None:
    run(command, NAME)


if __name__ == "__main__":
    main()
