"""The lines that ps-serve says, and which events of its shards a user is shown."""

from __future__ import annotations

import json
import os
from typing import Any

from narrows.protocols.runtime.cli.output import STDERR, stdout
from narrows.ps.dashboard.event_texts import printable, sentence

EMBEDDED = os.environ.get("NARROWS_EMBEDDED") == "1"  # in a ps-worker, which ends us by closing our stdin
NAME = "ps-worker" if EMBEDDED else "ps-serve"

FIGURES = ("worker", "summary", "waits", "handed over", "ended")
NOTED = (
    "void",
    "long",
    "against",
    "worker",
    "epoch",
    "waits",
)  # what members send, which samples are done, who is missing
# A user of ps-worker must know of these.
SHOWN_EMBEDDED = ("discarded", "restart", "lost", "refused", "hyper", "dropped", "disk", "damaged", "journal", "void", "long",
                  "against", "epoch", "replan", "stalled", "resumed")  # fmt: skip


def say(text: str, error: bool = False) -> None:
    """Lines for the console. Those of an embedded server are ps-worker's, whose stdout is the script's."""
    (STDERR if error or EMBEDDED else OUT).line(f"{NAME}: {printable(text)}")


def tell(event: str, **values: Any) -> None:
    """A line of JSON for the ps-worker that embeds this server."""
    OUT.line(json.dumps({"event": event, **values}))


# Of an embedded server it is a pipe, and its reader has ended where a line is lost.
OUT = stdout(lambda text: None if EMBEDDED else say(text, error=True))


def doing(text: str) -> None:
    """Say what the run has to wait for."""
    if EMBEDDED:
        tell("say", text=text)
    else:
        say(text)


def show(name: str, values: dict[str, Any]) -> None:
    """An event of a shard on the console; of an embedded server only some, and some go to the record of its ps-worker."""
    if EMBEDDED and name in NOTED:
        tell("noted", what=name, values=values)
    if name in FIGURES and "text" not in values:
        return  # a row of a record
    if not EMBEDDED or name in SHOWN_EMBEDDED or values.get("how") == "expired":
        say(str(values.get("text", "") or sentence(name, values) or values))
