"""The lines that ps-serve says, and which events of its shards a user is shown."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from narrows.ps.glance.events import sentence

EMBEDDED = os.environ.get("NARROWS_EMBEDDED") == "1"  # in a ps-worker, which ends us by closing our stdin
NAME = "ps-worker" if EMBEDDED else "ps-serve"

FIGURES = ("worker", "summary")
NOTED = ("void", "long", "against", "worker", "epoch")  # what members send, and which samples are done
# A user of ps-worker must know of these.
SHOWN_EMBEDDED = ("discarded", "restart", "lost", "refused", "hyper", "dropped", "disk", "damaged", "journal", "void", "long",
                  "against", "epoch", "replan")  # fmt: skip


def say(text: str, error: bool = False) -> None:
    """Lines for the console. Those of an embedded server are ps-worker's, whose stdout is the script's."""
    click.echo(f"{NAME}: {printable(text)}", err=error or EMBEDDED)


def printable(text: str) -> str:
    """Nothing that a stranger has named itself moves the cursor or rings the bell."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def doing(text: str) -> None:
    """Say what the run has to wait for."""
    if EMBEDDED:
        print(json.dumps({"event": "say", "text": text}), flush=True)
    else:
        say(text)


def show(name: str, values: dict[str, Any]) -> None:
    """An event of a shard on the console; of an embedded server only some, and some go to the record of its ps-worker."""
    if EMBEDDED and name in NOTED:
        print(json.dumps({"event": "noted", "what": name, "values": values}), flush=True)
    if name in FIGURES and "text" not in values:
        return  # a row of a record
    if not EMBEDDED or name in SHOWN_EMBEDDED or values.get("how") == "expired":
        say(str(values.get("text", "") or sentence(name, values) or values))
