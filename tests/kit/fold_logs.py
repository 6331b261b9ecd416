"""Compares acknowledged updates with those that the shards have folded: each update once, in its order, at its weight.

Server processes write the log by a hook (tests/kit/fold_log_hook/sitecustomize.py). For a worker in the test's own
process this module keeps the log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kit.processes import Worker
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import MemberEffect

HOOKED = {"PYTHONPATH": str(Path(__file__).parent / "fold_log_hook")}  # of an interpreter that can write it down
Update = tuple[int, int, int]  # worker, epoch, clock
CLOSE = 1e-6
REST_S = 0.01


def telling(folder: Path, planted: str = "") -> dict[str, str]:
    """Return the environment of a command whose processes log folds and acknowledgements in this folder."""
    folder.mkdir(exist_ok=True)
    return HOOKED | {"TOLD": str(folder), "PLANTED": planted}


def folded(folder: Path) -> list[list[tuple[Update, float]]]:
    """Return the updates that each shard has folded, with their weights; shards in the order of their keys."""
    paths = sorted(folder.glob("folded-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [[((row[0], row[1], row[2]), row[3]) for row in json.loads(path.read_text())] for path in paths]


def settled(*folders: Path) -> list[tuple[int, Update]]:
    """Return (shard, update) of each update acknowledged to a member that logs in these folders."""
    rows: list[tuple[int, Update]] = []
    for folder in folders:
        paths = [(int(path.stem.split("-")[1]), path) for path in folder.glob("settled-*.json")]
        begins = sorted({begin for begin, _ in paths})
        for begin, path in paths:
            rows += [(begins.index(begin), (row[0], row[1], row[2])) for row in json.loads(path.read_text())]
    return rows


class Log:
    """The acknowledgements of each shard to this worker: `settled`, and the weights in the acks."""

    def __init__(self, worker: Worker) -> None:
        assert worker.session.link is not None
        self.settled: list[tuple[int, Update]] = []
        self.weights: dict[tuple[int, Update], float] = {}
        self.member = worker.session.link.member
        self.receive, self.member.receive = self.member.receive, self._receive  # type: ignore[method-assign]

    def _receive(self, shard: int, message: m.Message, now_ns: int) -> list[MemberEffect]:
        effects = self.receive(shard, message, now_ns)
        if isinstance(message, m.PushAck) and message.status == m.PushStatus.FOLDED and message.weight:
            self.weights[shard, (message.worker, message.epoch, message.clock)] = message.weight
        for effect in effects:
            if isinstance(effect, e.PushSettled):
                self.settled.append((effect.shard, (self.member.worker, self.member.epoch, effect.clock)))
        return effects


def whole_run(address: str, steps: int, begun: threading.Event, rate: float = 0.001) -> Log:
    """Train a worker in this process and return its log. The steps are slow, so that a test can interfere."""
    worker = Worker(address, rate=rate)
    log = Log(worker)
    for step in range(steps):
        worker.step()
        time.sleep(REST_S)
        if step == 2:
            begun.set()
    worker.close()
    return log


def wrong(
    shards: Sequence[Sequence[tuple[Update, float]]],
    settled: Sequence[tuple[int, Update]],
    weights: dict[tuple[int, Update], float],
) -> list[str]:
    """Return a sentence for each update that is folded out of order, lost, or at another weight."""
    found = []
    for shard, rows in enumerate(shards):
        newest: dict[tuple[int, int], int] = {}
        for (worker, epoch, clock), _ in rows:
            before = newest.get((worker, epoch), clock - 1)
            if clock != before + 1:
                found.append(f"shard {shard} folds update {clock} of {worker, epoch} after {before}")
            newest[worker, epoch] = clock
        at = dict(rows)
        found += [f"shard {shard} lacks {update}, which is acknowledged" for of, update in settled
                  if of == shard and update not in at]  # fmt: skip
        found += [f"{update} on shard {shard} is at {at[update]}, its ack says {weight}"
                  for (of, update), weight in weights.items()
                  if of == shard and update in at and abs(at[update] - weight) > CLOSE]  # fmt: skip
    return found
