"""The console of ps-serve: the lines that it prints, and the events of its shards that it shows the user."""

from __future__ import annotations

import json
import os
from typing import Any

from narrows.protocols.runtime.cli.output import STDERR, CommandConsole, stdout
from narrows.ps.dashboard.event_texts import sentence

# True if a ps-worker has started this ps-serve. The ps-worker ends it by closing its stdin.
EMBEDDED = os.environ.get("NARROWS_EMBEDDED") == "1"
NAME = "ps-worker" if EMBEDDED else "ps-serve"

FIGURES = ("worker", "summary", "waits", "handed over", "ended", "trace", "relay", "mailbox")
NOTED = (
    "void",
    "long",
    "against",
    "worker",
    "epoch",
    "waits",
    "trace",
)  # events that go to the record of the ps-worker which embeds this server
# Events that a user of ps-worker must see.
SHOWN_EMBEDDED = ("discarded", "restart", "lost", "refused", "hyper", "dropped", "disk", "damaged", "journal", "void", "long",
                  "against", "epoch", "replan", "stalled", "resumed")  # fmt: skip


def tell(event: str, **values: Any) -> None:
    """Send an event, as a line of JSON, to the ps-worker that embeds this server."""
    OUT.line(json.dumps({"event": event, **values}))


def _refused(text: str) -> None:
    if not EMBEDDED:
        say(text, error=True)


# An embedded server's stdout is a pipe to ps-worker. A line that is lost there means that ps-worker has ended.
OUT = stdout(_refused)
# An embedded server prints in the name of ps-worker, to stderr: stdout belongs to the script.
say = CommandConsole(NAME, STDERR if EMBEDDED else OUT).say


def doing(text: str) -> None:
    """Print what the run waits for."""
    if EMBEDDED:
        tell("say", text=text)
    else:
        say(text)


def show(name: str, values: dict[str, Any]) -> None:
    """Show an event of a shard on the console. An embedded server shows some, and sends some to ps-worker's record."""
    if EMBEDDED and name in NOTED:
        tell("noted", what=name, values=values)
    if name in FIGURES and "text" not in values:
        return  # figures, which stand in the record alone
    if not EMBEDDED or name in SHOWN_EMBEDDED or values.get("how") == "expired":
        say(str(values.get("text", "") or sentence(name, values) or values))
