"""ps-plot: a record as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.flags import COMMAND, run


@click.command(context_settings=COMMAND)
@click.argument("record", metavar="FILE")
@click.option("--out", default="", help="the picture; its ending says which kind [FILE with .png]")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(record: str, out: str) -> None:
    """Draw the record FILE of ps-serve or of ps-worker: loss by steps, seconds and bytes, time of steps, links."""
    from narrows.ps.glance.reading import Record

    try:
        from narrows.ps.glance.plot import plot
    except ImportError:
        raise UsageError("matplotlib is missing here: pip install 'narrows[plot]'") from None
    read, path = Record(record), Path(out or Path(record).with_suffix(".png"))
    read.read()
    if not read.history.lanes:
        raise UsageError(f"{record}: no member has said anything in it yet")
    try:
        plot(read.history).savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: {error}") from None
    click.echo(path)


def main() -> None:
    run(command, "ps-plot")


if __name__ == "__main__":
    main()
