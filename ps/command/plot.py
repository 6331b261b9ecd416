"""ps-plot: a picture of one record, or of several compared."""

from __future__ import annotations

from pathlib import Path

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, run


@click.command(context_settings=COMMAND)
@click.argument("records", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--out", default="", help="file of the picture; its suffix gives the format [FILE.png; of several, compared.png]"
)
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(records: tuple[str, ...], out: str) -> None:
    """Draw the record FILE of ps-serve or ps-worker: loss by steps, seconds and bytes, time of steps, links.

    Several files are compared, with a curve of the loss for each. If all losses are above 0, the axis of the loss is
    logarithmic.
    """
    from narrows.ps.dashboard.record_reader import RecordReader

    try:
        from narrows.ps.dashboard.plot import compared, plot
    except ImportError:
        raise UsageError("matplotlib is missing here: pip install 'narrows[plot]'") from None
    histories = {}
    for record in records:
        read = RecordReader(record)
        read.read()
        if not read.history.lanes:
            raise UsageError(f"{record}: the record has no event of a member yet")
        histories[record] = read.history
    path = Path(out or (Path(records[0]).with_suffix(".png") if len(records) == 1 else "compared.png"))
    figure = plot(histories[records[0]], records[0]) if len(records) == 1 else compared(histories)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: {error}") from None
    click.echo(path)


def main() -> None:
    run(command, "ps-plot")


if __name__ == "__main__":
    main()
