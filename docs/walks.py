"""Prints the walks of docs/archive/walks.md: the functions that one message passes in the machine that receives it.

`python docs/walks.py` trains small nets in one process and records calls with sys.setprofile. A function counts once, with its
comprehensions. Lambdas and the functions of messages (protocols/messages/) do not count. A walk is the shortest of its
kind in a steady run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from kit import scripts
from kit.in_process import Cluster

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.ps.server.server import Server
from narrows.ps.shard.reports import COORDINATOR
from narrows.worker import DistributedOptimizer

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("protocols", "compression", "ps", "worker"))
MESSAGES = f"{ROOT / 'protocols/messages'}/"  # the checks of fields, above all
STEPS = 16
Walk = dict[tuple[str, str], None]  # file and function, in the order of the first calls


def walked(call: Callable[[], Any]) -> tuple[Any, Walk]:
    """Return what `call` returns, and the functions of the product that it passed."""
    walk: Walk = {}

    def seen(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PRODUCT) and not code.co_filename.startswith(MESSAGES):
            name = code.co_qualname.partition(".<locals>.<")[0].replace(".<locals>", "")
            if "<" not in name and "<lambda>" not in code.co_qualname:
                walk[code.co_filename.removeprefix(f"{ROOT}/"), name] = None

    sys.setprofile(seen)
    try:
        return call(), walk
    finally:
        sys.setprofile(None)


class Recorder:
    """Records what the shards without a coordinator are told, by what it is."""

    def __init__(self) -> None:
        self.walks: dict[str, Walk] = {}

    def note(self, kind: str, walk: Walk) -> None:
        if kind not in self.walks or len(walk) < len(self.walks[kind]):
            self.walks[kind] = walk

    def run(self, settings: Settings, below: Settings | None = None) -> None:
        """Train a small net. `below`: two clusters of such settings are the workers."""
        handle, handle_above = Server.handle, Server.handle_above

        def handled(server: Server, peer: bytes, message: m.Message, now_ns: int) -> Any:
            kind = kind_of(message, server.shard.ledger)
            done, walk = walked(lambda: handle(server, peer, message, now_ns))
            if server.coordinator is None and below is None and kind:
                self.note(f"{kind}, {settings.sync}", walk)
            return done

        def handled_above(server: Server, message: m.Message, now_ns: int) -> Any:
            done, walk = walked(lambda: handle_above(server, message, now_ns))
            if server.coordinator is None and isinstance(message, m.State):
                self.note(f"a state from above, {settings.sync} over {below.sync if below else ''}", walk)
            return done

        setattr(Server, "handle", handled)  # noqa: B010 - for the time of this run
        setattr(Server, "handle_above", handled_above)  # noqa: B010
        try:
            root = Cluster(settings)
            clusters = [Cluster(below, root, name) for name in "ab"] if below is not None else []
            with scripts.tree(root, *clusters) if clusters else scripts.run(settings, root) as run:
                run.together(train)
            server = root.servers[1]
            ledger = server.shard.ledger
            for version in (ledger.version, ledger.version + 1) if below is None else ():
                server.handle(COORDINATOR, numbered(ledger, version), root.now())
        finally:
            setattr(Server, "handle", handle)  # noqa: B010
            setattr(Server, "handle_above", handle_above)  # noqa: B010


def numbered(ledger: m.Ledger, version: int) -> m.Ledger:
    return m.Ledger(**{name: getattr(ledger, name) for name in m.Ledger.__slots__} | {"version": version})


def kind_of(message: m.Message, before: m.Ledger) -> str:
    """Name the kind of this message for a shard that has the ledger `before`; "" for kinds that are not looked at."""
    if isinstance(message, m.Push):
        return "a push in one part" if message.parts == 1 else ""
    if not isinstance(message, m.Ledger) or not before.started:
        return ""
    if message.version <= before.version:
        return "a ledger that the shard has"
    numbers = {"version", "report_seen"}
    changed = {name for name in m.Ledger.__slots__ if getattr(message, name) != getattr(before, name)} - numbers
    if not changed:
        return "a ledger with other numbers alone"
    return "a ledger that closes a clock" if changed <= {"min_clock", "sets"} else ""


def train(worker: int) -> None:
    net = scripts.build()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        scripts.loss_of(net, step, worker, 2).backward()
        optimizer.step()


def show(walks: dict[str, Walk]) -> None:
    for kind, walk in walks.items():
        by_file: dict[str, list[str]] = {}
        for file, name in walk:
            by_file.setdefault(file, []).append(name)
        print(f"### {kind[0].upper()}{kind[1:]}: {len(walk)} functions, {len(by_file)} files\n")
        for file, names in by_file.items():
            print(f"- {file}: {', '.join(names)}")
        print()


if __name__ == "__main__":
    torch.set_num_threads(1)
    recorder = Recorder()
    recorder.run(Settings(sync="ssp", shards=2, workers=2))
    recorder.run(Settings(sync="bsp", shards=2, workers=2))
    recorder.run(Settings(sync="ssp", shards=2, workers=2), Settings(sync="bsp", shards=2, workers=1))
    show(recorder.walks)
