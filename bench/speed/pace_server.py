"""One server process of pace.py: that of ps-serve, whose store sleeps in place of its arithmetic.

Emulated: the fold of an update, the outer step and the coding of a state (`replay`). A coded state is a payload of
`Payloads`, with the size and the values of a real one. A dense state is the first weights each time. The rest is the
product's: the check of each payload, ledger, publications, messages, ZeroMQ, TCP. The CPU time of a push is stretched as in
pace_worker.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from narrows.protocols.runtime.network.sockets import Peer
from narrows.ps.process import main as server_main
from narrows.ps.process import process_lifecycle
from narrows.ps.process.runner import ServerRunner
from narrows.ps.store import store as stores
from narrows.ps.store.changes import Fold, OuterStep, Publish
from narrows.ps.store.store import Store

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab.replay import Payloads, PhaseFile

PHASE = PhaseFile(Path(os.environ["PACE_PHASE"]))
PUSH_BYTES = 4096  # no other message is as long
PAYLOADS: dict[str, Payloads] = {}  # by SPEC


def fold(store: Store, change: Fold | OuterStep) -> None:
    store._own_x()
    begin, end = change.keys if isinstance(change, OuterStep) else store.whole
    PHASE.sleep(PHASE.now().coding.add * (end - begin) * len(change.terms))


def publish(store: Store, change: Publish) -> None:
    """Publish as `Store._publish` does, without the arithmetic."""
    begin, end = keys = store.whole if change.keys is None else change.keys
    PHASE.sleep(PHASE.now().coding.publish * (end - begin))
    if store.down.lossless:
        return Store._publish(store, change)
    if change.spec:
        store.down = store.codings.compressor(change.spec).contraction()
    spec = store.down.spec
    if spec not in PAYLOADS:
        PAYLOADS[spec] = Payloads(spec, Path(os.environ["PACE_UPDATES"]))
    store.publication += 1
    store.rebased = store.unpublished = False
    store.deltas[store.publication] = (keys, bytes(PAYLOADS[spec].of(*keys, store.publication)))
    store._forget()


class StretchedRunner(ServerRunner):
    """The runner of a server in a dilated phase: it sleeps after each push until the push has taken D times its CPU time.

    Other messages, such as heartbeats, are small. Their CPU time is not stretched.
    """

    def receive(self, peer: Peer, frames: list[Any]) -> None:
        with PHASE.stretched(out=sum(map(len, frames)) < PUSH_BYTES):
            super().receive(peer, frames)


def replay() -> None:
    """Put the functions of this file in the place of the product's, in this process."""
    stores.APPLY.update({Fold: fold, OuterStep: fold, Publish: publish})
    vars(process_lifecycle)["ServerRunner"] = StretchedRunner


if __name__ == "__main__":
    replay()
    sys.exit(server_main.main())
