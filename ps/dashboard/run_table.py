"""The list of several runs: one row for each, of the entries of this machine or of the pages at some addresses.

A run with a page is asked for its newest frame, which has its loss and its rate too. All pages are asked at once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols.config.run_name import NAME
from narrows.protocols.errors import UnreachableError, printable
from narrows.ps.dashboard.run_registry import NUMBER_MAX, TEXT_MAX, RunFacts

ASKED_MAX = 32  # pages that are asked at the same time
COLUMNS = ("name", "address", "mode", "workers", "clock", "running", "page")
MORE = ("loss", "rate", "state")  # columns that need a page


@dataclass(frozen=True)
class RunRow:
    """One run of the list.

    Attributes:
        facts: what is known without its page, or what its page says.
        loss: the mean of the workers' newest losses; None: not known.
        rate: with its unit, "" for none.
        state: what the run waits for, "over", or why its page does not answer.
    """

    facts: RunFacts
    loss: float | None = None
    rate: str = ""
    state: str = ""


def lines(found: Sequence[RunFacts]) -> list[str]:
    """Return each run as one line of JSON."""
    now = time.time()
    return [json.dumps(facts.told(now)) for facts in found]


def table(found: Sequence[RunFacts]) -> list[str]:
    """Return the runs as lines of a table of text; one sentence if there are none."""
    if not found:
        return ["no run of this user on this machine"]
    texts = [COLUMNS, *(tuple(cells(RunRow(facts))[name] for name in COLUMNS) for facts in found)]
    widths = [max(len(row[at]) for row in texts) for at in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def told(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Return the rows as values of JSON, for a page: the facts, and the text of each column. HOST:PORT becomes a URL."""
    from narrows.ps.dashboard.record_reader import page_url

    now = time.time()
    found = [row.facts.told(now) | {"cells": cells(row)} for row in rows]
    runs = [each | {"page": each["page"] and page_url(each["page"]) + "/"} for each in found]
    return {"runs": runs, "columns": [*COLUMNS, *MORE], "pid": -1}


def cells(row: RunRow) -> dict[str, str]:
    """Return the text of each column for one run."""
    facts = row.facts
    seconds = int(max(0.0, time.time() - facts.began)) if facts.began else -1
    clock = f"{facts.clock:,}" if facts.clock >= 0 else "-"
    texts = {
        "name": facts.name or "-",
        "address": facts.address or "-",
        "mode": f"standby of {facts.copies}" if facts.copies else facts.mode or "-",
        "workers": f"{facts.workers} of {facts.wanted}" if facts.workers < facts.wanted else str(facts.workers),
        "clock": clock,
        "running": f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}" if seconds >= 0 else "-",
        "page": facts.page or "-",
        "loss": f"{row.loss:.4g}" if row.loss is not None else "-",
        "rate": row.rate or "-",
        "state": row.state,
    }
    return {name: printable(text) for name, text in texts.items()}


def with_pages(found: Sequence[RunFacts]) -> list[RunRow]:
    """Ask the pages of these runs for what they show. A run without a page has a row too."""
    with ThreadPoolExecutor(max(1, min(ASKED_MAX, len(found)))) as pool:
        return [*pool.map(_asked, found)]


def _asked(facts: RunFacts) -> RunRow:
    from narrows.ps.dashboard.record_reader import newest_frame  # urllib, which ps-serve runs does without

    if not facts.page:
        return RunRow(facts, state="no page: ps-serve --dashboard serves one")
    try:
        return row_of(facts, newest_frame(facts.page))
    except UnreachableError as error:
        return RunRow(facts, state=str(error))


def row_of(facts: RunFacts, frame: dict[str, Any]) -> RunRow:
    """Return the row of a run whose page has sent this frame. What is no figure in it counts as not known."""
    run = frame.get("run") if isinstance(frame.get("run"), dict) else {}
    assert isinstance(run, dict)

    def text(name: str, known: str) -> str:
        value = run.get(name, known)
        return value[:TEXT_MAX] if isinstance(value, str) else known

    def number(values: dict[str, Any], name: str, known: float) -> float:
        value = values.get(name)
        return value if isinstance(value, (int, float)) and abs(value) <= NUMBER_MAX else known

    name = text("name", facts.name)
    shown = replace(
        facts,
        name=name if NAME.fullmatch(name) else "",
        address=text("address", facts.address),
        mode=text("mode", facts.mode),
        summary=text("summary", facts.summary),
        workers=int(number(frame, "live", facts.workers)),
        wanted=int(number(run, "workers", facts.wanted)),
        clock=int(number(frame, "clock", facts.clock)),
        began=number(run, "began", facts.began),
    )
    each, unit = number(frame, "samples_rate", -1), "samples/s"
    if each < 0:
        each, unit = number(frame, "steps_rate", 0), "steps/s"
    waits = frame.get("waits")
    state = "over" if frame.get("over") is True else str(waits)[:TEXT_MAX] if isinstance(waits, str) else ""
    loss = number(frame, "loss", math.nan)
    return RunRow(shown, None if math.isnan(loss) else loss, f"{each:.3g} {unit}" if each > 0 else "", state)
