"""ps-plot: a picture of one record, or of several compared."""

from __future__ import annotations

import json
from pathlib import Path

import click

from narrows.protocols.addresses import is_stored
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, PLACE, run


@click.command(context_settings=COMMAND)
@click.argument("records", metavar="FILE...", nargs=-1, required=True, type=PLACE)
@click.option(
    "--out", default="", help="file of the picture; its suffix gives the format [FILE.png; of several, compared.png]"
)
@click.option("--trace", is_flag=True, help="write the events of ps-worker --trace and ps-serve --trace for Perfetto; the last "
              "FILE is the one to write, OUT.json")  # fmt: skip
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(records: tuple[str, ...], out: str, trace: bool) -> None:
    """Draw the record FILE of ps-serve or ps-worker: loss by steps, seconds and bytes, time of steps, links.

    A FILE may be an address, s3://BUCKET/NAME, as of --record. Several files are compared, with a curve of the loss for
    each. If all losses are above 0, the axis of the loss is logarithmic. With --trace all FILEs but the last are the
    records of one run: of its ps-workers and its ps-serves.
    """
    if trace:
        return _trace(records if not out else (*records, out))
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
    alone = Path(records[0]).name if is_stored(records[0]) else records[0]
    path = Path(out or (Path(alone).with_suffix(".png") if len(records) == 1 else "compared.png"))
    figure = plot(histories[records[0]], records[0]) if len(records) == 1 else compared(histories)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: {error}") from None
    click.echo(path)


def _trace(files: tuple[str, ...]) -> None:
    """Write the trace of all files but the last to the last.

    Raises:
        UsageError: a file is missing or no record, or the trace cannot be written.
    """
    from narrows.ps.dashboard.record_reader import events
    from narrows.ps.dashboard.trace_events import TraceSources

    *records, path = files
    if not records or not path.endswith(".json"):
        raise UsageError(f"--trace {path}: name the records first, and then the file to write, OUT.json")
    sources, names = TraceSources(), [Path(record).name for record in records]
    for record in dict.fromkeys(records):
        name = Path(record).name if names.count(Path(record).name) == 1 else record
        for number, event in enumerate(events(record), 1):
            try:
                sources.take(name, event)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UsageError(f"{record}: line {number} is not one of a record ({error})") from None
    made = sources.events()
    try:
        Path(path).write_text(json.dumps(made, separators=(",", ":")))
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}") from None
    click.echo(path)


def main() -> None:
    run(command, "ps-plot")


if __name__ == "__main__":
    main()
