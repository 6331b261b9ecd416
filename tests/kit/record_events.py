"""The events of the record of an invented run."""

from __future__ import annotations

import json
from typing import Any

from narrows.protocols.member.heartbeat_summary import STALE, Summary, SummaryRow
from narrows.ps.dashboard.history import RunHistory

RUN = {
    "event": "run",
    "seconds": 0.0,
    "mode": "ssp",
    "summary": "--sync ssp",
    "workers": 2,
    "shards": 1,
    "local_steps": 1,
}
BEAT_S = 2.5


def summary(
    seconds: float,
    rank: int,
    clock: int,
    *,
    steps: int | None = None,
    life_s: float | None = None,
    path: tuple[int, ...] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the event of a worker at this clock. It has taken `steps` steps, by default `clock`, in its whole life."""
    life_s, steps = seconds if life_s is None else life_s, clock if steps is None else steps
    spent = {"compute_seconds": 0.6 * life_s, "encode_seconds": 0.2 * life_s, "wait_seconds": 0.2 * life_s}
    stale = (0, steps, *[0] * (len(STALE) - 1))
    figures: dict[str, Any] = {
        "seconds": life_s,
        "clock": clock,
        "steps": steps,
        "updates": steps,
        "samples": 10 * steps,
        "bytes_up": 100 * steps,
        "bytes_down": 200 * steps,
        "staleness": 1,
        "stale": stale,
        "busy_up_seconds": 0.25 * life_s,
        "rate_up": 1e6,
        "round_trip_seconds": 0.04,
        "loss": 1.0 / (1 + steps),
        **spent,
        **more,
    }
    row = SummaryRow((rank, *path), "host", "", Summary(**figures)).told()
    return {"event": "summary", "seconds": seconds, "worker": rank, "clock": 0, "parameters": 50, "rows": [row]}


def history_of(*events: dict[str, Any]) -> RunHistory:
    history = RunHistory()
    for event in (RUN, *events):
        history.take(json.loads(json.dumps(event)))  # as it comes from a file
    return history


def beats(until_s: float, rank: int, rate: float) -> list[dict[str, Any]]:
    """Return the summaries of a worker that takes `rate` steps a second."""
    times = [BEAT_S * beat for beat in range(1, int(until_s / BEAT_S) + 1)]
    return [summary(at, rank, int(at * rate)) for at in times]


def figures(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a frame that do not depend on the time of reading."""
    of_member = ("path", "host", "clock", "step_seconds", "staleness", "bytes", "step_bytes", "loss")
    members = [{name: each[name] for name in of_member} for each in frame["members"]]
    names = ("clock", "loss", "bytes_up", "bytes_down", "ratio", "curve", "events", "over")
    return json.loads(json.dumps({name: frame[name] for name in names} | {"members": members}))  # type: ignore[no-any-return]
