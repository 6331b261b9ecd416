"""One worker of pace.py: the product's DistributedOptimizer, which sleeps in the place of its arithmetic.

Emulated: the script's step, which is a sleep, and four parts of the worker's own step, which `ReplayReplica` and `ReplayArrays`
sleep for: the difference, the encode, the fold of a state and the composition of the replica. `Payloads` makes the payloads,
with the size and the values of real ones. The rest is the product's: the engine's waits, exchanges, messages, the I/O thread,
ZeroMQ, TCP.

In a phase of dilation D each sleep takes D times as long. After each step() the main thread sleeps until its CPU time in it has
taken D times as long too. Where `Coding.host` says how long that CPU time is on another machine, the worker sleeps for that
instead. The I/O thread runs beside the main thread, and its CPU time is not stretched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from narrows.compression.codecs import Piece, PieceLike, coded_piece
from narrows.compression.replica import ArrayReplica
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.member.exchange import Exchange
from narrows.worker import DistributedOptimizer, rank
from narrows.worker.model.arrays import Feedbacks, WorkerArrays
from narrows.worker.model.flat import Array
from narrows.worker.sync import engine

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab.replay import Payloads, PhaseFile, Still, model_of


class ReplayReplica(ArrayReplica[Array]):
    """The replica of one shard's keys, which reads and writes no value."""

    phase: PhaseFile
    payloads: Payloads

    def encode(self, update: Any, clock: int, last: bool = False) -> list[Piece]:
        begin, end = self.fragment(clock)
        coding = self.phase.now().coding
        self.phase.sleep(coding.encode * (end - begin) + coding.host)
        if self.payloads.raw:
            return self.home.raw_pieces(self.payloads.values(begin, end, 0), begin, self.cut(begin, end))
        return [coded_piece(self.payloads.of(begin, end, clock), begin, end)]

    def absorb(self, pieces: Sequence[PieceLike], add: bool) -> None:
        self.phase.sleep(self.phase.now().coding.fold * sum(piece.end - piece.begin for piece in pieces))

    def base(
        self, stand_ins: Iterable[tuple[float, PieceLike]], begin: int, end: int, out: Array, gain: float = 1.0
    ) -> None:
        self.phase.sleep(self.phase.now().coding.compose * (end - begin))


class ReplayArrays(WorkerArrays):
    phase = PhaseFile(Path(os.environ["PACE_PHASE"]))
    payloads = Payloads(os.environ["PACE_SPEC"], Path(os.environ["PACE_UPDATES"]))

    def replica(self, begin: int, end: int, feedbacks: Feedbacks) -> ArrayReplica[Array]:
        made = ReplayReplica(begin, end, feedbacks, parts, self._at(self.pulled, begin, end))
        made.phase, made.payloads = self.phase, self.payloads
        for keys, _ in feedbacks:
            self.payloads.make(*keys)
        return made

    def show(self, exchanges: Sequence[Exchange[Array]]) -> None:
        self.shown = True
        for exchange in exchanges:
            exchange.base(exchange.replica.begin, exchange.replica.end, self.base)

    def merge(self, exchange: Exchange[Array], keys: Keys, alpha: float) -> None:
        exchange.base(*keys, self.base)


def main() -> None:
    torch.set_num_threads(1)
    vars(engine)["WorkerArrays"] = ReplayArrays  # the engine names it as its own
    model = model_of(os.environ["PACE_SIZE"])
    optimizer = DistributedOptimizer(Still(model.parameters()), model)
    phase = ReplayArrays.phase

    def step() -> None:
        phase.sleep(phase.now().compute_s)
        with phase.stretched(out=bool(phase.now().coding.host)):
            optimizer.step()

    phase.follow(rank(), step)
    os._exit(0)  # without the flush at the end of a run: bench/speed/start_and_end.py measures it


if __name__ == "__main__":
    main()
