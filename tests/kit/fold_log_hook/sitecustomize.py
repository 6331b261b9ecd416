"""Each process of a run writes down what its model is made of, and what it was acknowledged: put this folder on PYTHONPATH, and
name one in TOLD.

Folded updates are kept in the store itself, acknowledged ones in the exchange. So both go where the machine goes: into
the journal, and with it into the process that comes after one that was killed. A line is what this machine has folded, not
what some process once did. PLANTED: what becomes of updates that are folded while events are done again, "lost" or "twice".
A process that reaches the phase PHASE writes its pid to the file `struck-N` of that folder, and stops. N counts these stops, up
to STRIKES. bench/faults/phase_kills.py then kills a process. Before stop N a process passes the phase EVERY times for each N. A
process that replays a journal does not stop.
A member says that its link has the rate which the file `narrow` in that folder names, once it is there.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrows.compression import codecs
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.member import heartbeat_summary, metrics
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.runtime.network import shared_memory, sockets
from narrows.ps.journal.array_segment import ArraySegment
from narrows.ps.journal.journal import Journal
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.store.changes import Fold, OuterStep, Publish, Step
from narrows.ps.store.store import Store

TIMES = {"": 1, "lost": 0, "twice": 2}
replaying = False


def _folder() -> Path:
    """Return the folder of the log. A process that forks commands imports this module before the folder exists."""
    return Path(os.environ["TOLD"])


def _write(name: str, lines: list[Any]) -> None:
    path = _folder() / f"{name}.{os.getpid()}"
    path.write_text(json.dumps(lines))
    path.rename(_folder() / f"{name}.json")


def _apply(store: Any, change: Any, apply: Any = Store.apply) -> Any:
    if not isinstance(change, (Fold, OuterStep, Step)):
        return apply(store, change)
    for _ in range(TIMES[os.environ["PLANTED"]] if replaying else 1):
        apply(store, change)
        store.told = getattr(store, "told", [])
        for weight, update in change.terms:
            push: Any = update[0]
            scale = getattr(change, "scale", 1.0)
            store.told.append((push.worker, push.epoch, push.clock, weight * scale))
    _write(f"folded-{store.begin}", store.told)


def _take(exchange: Any, event: Any, take: Any = Exchange.take) -> Any:
    says = take(exchange, event)
    if isinstance(event, e.PushSettled):
        exchange.told = [*getattr(exchange, "told", []), (exchange.worker, exchange.epoch, event.clock)]
        _write(f"settled-{exchange.replica.begin}-{exchange.worker}", exchange.told)
    return says


def _replay(journal: Any, *words: Any, replay: Any = Journal.replay) -> Any:
    global replaying
    replaying = True
    done = replay(journal, *words)
    replaying = False
    return done


def _go_on(planned: Any, before: Any, go_on: Any = ModelShard.go_on) -> None:
    """Carry the log over to the store that a new plan makes."""
    go_on(planned, before)
    planned.store.told = getattr(before.store, "told", [])


def _goes_on(exchange: Any, *words: Any, go_on: Any = Exchange.go_on) -> Any:
    """Carry the log over to the exchange that a new plan makes."""
    says = go_on(exchange, *words)
    here = [each for each in words[-1] if each.replica.begin == exchange.replica.begin]
    exchange.told = getattr(here[0], "told", []) if here else []
    return says


def _packed(rows: Any, packed: Any = heartbeat_summary.packed) -> Any:
    if (narrow := _folder() / "narrow").exists():
        rate = float(narrow.read_text())
        rows = [replace(rows[0], summary=replace(rows[0].summary, rate_up=rate, rate_down=rate)), *rows[1:]]
    return packed(rows)


# Owner and name of a function, whether its end is the phase or its begin, and of which calls.
AFTER, BEFORE = True, False
ALWAYS: Callable[..., bool] = lambda *words: True  # noqa: E731
PHASES: dict[str, tuple[Any, str, bool, Callable[..., bool]]] = {
    "before it copies a frame into its pool": (shared_memory.SharedLink, "put", BEFORE, ALWAYS),
    "with a frame in its pool that is not sent": (shared_memory.SharedLink, "put", AFTER, ALWAYS),
    "after it has sent a frame": (sockets.Sockets, "send", AFTER, lambda port, to, frames, **more: len(frames) == 2),
    "as it opens a frame": (shared_memory.SharedLink, "open", AFTER, ALWAYS),
    "before a push is in the journal": (Journal, "note", BEFORE, lambda journal, event, *more: _is_push(event)),
    "after a push is in the journal": (Journal, "note", AFTER, lambda journal, event, *more: _is_push(event)),
    "amid a fold": (codecs, "add", AFTER, ALWAYS),
    "after a fold": (Store, "apply", AFTER, lambda store, change: isinstance(change, (Fold, OuterStep, Step))),
    "before it publishes": (Store, "apply", BEFORE, lambda store, change: isinstance(change, Publish)),
    "with a new machine in the journal and the old arrays": (Journal, "_settle", BEFORE, ALWAYS),
    "with a new machine in the journal and the new arrays": (ArraySegment, "keep", AFTER, ALWAYS),
}
passed = 0  # calls of the phase in this process


def _due(journal: Any, clock: int, due: Any = Journal.due) -> bool:
    """Begin the journal anew after each event, if a phase of that is to come."""
    return bool(due(journal, clock) or ("in the journal and" in os.environ.get("PHASE", "") and not journal.failure))


def _is_push(event: Any) -> bool:
    return isinstance(event.message, m.Push)


def _comes_to(phase: str) -> None:
    """Stop this process, if it is its turn."""
    global passed
    if os.environ.get("PHASE") != phase or replaying:
        return
    passed += 1
    for strike in range(int(os.environ["STRIKES"])):
        if not (path := _folder() / f"struck-{strike}").exists():
            if passed >= int(os.environ["EVERY"]) * (strike + 1):
                with contextlib.suppress(FileExistsError), path.open("x") as file:
                    file.write(f"{os.getpid()}\n")
                    file.flush()
                    os.kill(os.getpid(), signal.SIGSTOP)
            return


def _watched(phase: str, owner: Any, name: str, after: bool, counts: Callable[..., bool]) -> None:
    plain = getattr(owner, name)

    def called(*words: Any, **more: Any) -> Any:
        of_phase = os.environ.get("PHASE") == phase and counts(*words, **more)
        if of_phase and not after:
            _comes_to(phase)
        done = plain(*words, **more)
        if of_phase and after:
            _comes_to(phase)
        return done

    setattr(owner, name, called)


ArraySegment.least = 1  # so that arrays of small models lie in it
shared_memory.LEAST_BYTES = 1  # so that their frames do
for where, name, what in (
    (metrics, "packed", _packed),
    (ModelShard, "go_on", _go_on),
    (Exchange, "go_on", _goes_on),
    (Store, "apply", _apply),
    (Exchange, "take", _take),
    (Journal, "replay", _replay),
    (Journal, "due", _due),
):
    setattr(where, name, what)
for phase, place in PHASES.items():
    _watched(phase, *place)
