"""Prints the walks of docs/archive/walks.md: the functions that one message passes in the machine that receives it.

`python docs/walks.py` trains small nets in one process and records calls with sys.setprofile. A function counts once, with its
comprehensions. Lambdas and the functions of messages (protocols/messages/) do not count. A walk is the shortest of its
kind in a steady run. `python docs/walks.py worker` prints those of a worker that trains with a ps-serve over sockets: from
step() until its push is with the sockets, and from a state's arrival until it is in the parameters.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from kit import scripts
from kit.in_process import Cluster
from kit.processes import serving

from narrows.protocols import effects
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.wire import decode
from narrows.ps.server.server import Server
from narrows.ps.shard.reports import COORDINATOR
from narrows.worker import DistributedOptimizer, session
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.engine import Engine
from narrows.worker.sync.updates import UpdateStep

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("protocols", "compression", "ps", "worker"))
MESSAGES = f"{ROOT / 'protocols/messages'}/"  # the checks of fields, above all
STEPS = 16
Walk = dict[tuple[str, str], None]  # file and function, in the order of the first calls
LOOP = "protocols/runtime/network/loop.py"
WALKING: dict[int, Walk] = {}  # by thread, the walk that is recorded


def walked(call: Callable[[], Any], inner: bool = True) -> tuple[Any, Walk]:
    """Return what `call` returns, and the functions of the product that it passed.

    Within another walk they do not count for that one, unless `inner` is False.
    """
    walk: Walk = {}
    thread, outer = threading.get_ident(), sys.getprofile()
    around = WALKING.get(thread)
    WALKING[thread] = walk

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
        sys.setprofile(outer)
        WALKING.pop(thread)
        if around is not None:
            WALKING[thread] = around
            around |= {} if inner else walk


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


class WorkerRecorder:
    """Records the steps of one worker: the main thread, and the thread of its link."""

    def __init__(self) -> None:
        self.walks: dict[str, Walk] = {}
        self.early: Walk | None = None  # of the step in progress, until its push is handed to the link's thread
        self.said: list[m.Message] = []  # messages that the link's thread has sent

    def note(self, kind: str, *walks: Walk) -> None:
        walk = {each: None for part in walks for each in part}
        if kind not in self.walks or len(walk) < len(self.walks[kind]):
            self.walks[kind] = walk

    def run(self, sync: str) -> None:
        """Train a small net as the only worker of a ps-serve."""
        call, put, hear, handle = Loop.call, MemberLink._put, MemberLink._hear, Engine._handle
        ready = UpdateStep.ready
        step = f"step() until its push is with the sockets, {sync}"
        state = {name: Walk() for name in ("heard", "handled", "shown")}

        def called(loop: Loop, command: Callable[[], object]) -> None:
            before = dict(WALKING.get(threading.get_ident(), {}))

            def commanded() -> None:
                self.said = []
                _, walk = walked(command)
                if any(isinstance(message, m.Push) for message in self.said):
                    self.note(step, before, {(LOOP, "Loop.call"): None}, walk)

            call(loop, commanded)

        def was_put(link: MemberLink, to: str, message: m.Message) -> None:
            self.said.append(message)
            put(link, to, message)

        def shortest(name: str, walk: Walk) -> None:
            if not state[name] or len(walk) < len(state[name]):
                state[name] = walk

        def heard(link: MemberLink, peer: Any, frames: Any) -> None:
            _, walk = walked(lambda: hear(link, peer, frames))
            if any(name.endswith("._deliver") for _, name in walk) and isinstance(decode(frames), m.State):
                shortest("heard", walk)

        def handled(engine: Engine, event: Any) -> None:
            _, walk = walked(lambda: handle(engine, event))  # which is no part of the step that handles it
            if isinstance(event, effects.StateArrived):
                shortest("handled", walk)

        def readied(sync_step: UpdateStep, *limit: float) -> None:
            _, walk = walked(lambda: ready(sync_step, *limit), inner=False)
            shortest("shown", walk)

        patches = [
            (Loop, "call", called),
            (MemberLink, "_put", was_put),
            (MemberLink, "_hear", heard),
            (Engine, "_handle", handled),
            (UpdateStep, "ready", readied),
        ]
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        for owner, name, function in patches:
            setattr(owner, name, function)
        try:
            with serving("--insecure", "--shards", "2", "--workers", "1", "--sync", sync) as server:
                os.environ["NARROWS_SERVER"] = server.address
                net = scripts.build()
                optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
                for number in range(STEPS):
                    optimizer.zero_grad()
                    scripts.loss_of(net, number, 0, 1).backward()
                    _, walk = walked(lambda: optimizer.step())
                    self.note(f"step() in the main thread, whole, {sync}", walk)
                optimizer.finish()
                session._at_exit()
                session._session = None  # the next run has another
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)
        self.note(f"a state until it is in the parameters, {sync}", *state.values())


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
    if sys.argv[1:] == ["worker"]:
        of_worker = WorkerRecorder()
        for sync in ("ssp", "bsp"):
            of_worker.run(sync)
        show(of_worker.walks)
        sys.exit()
    recorder = Recorder()
    recorder.run(Settings(sync="ssp", shards=2, workers=2))
    recorder.run(Settings(sync="bsp", shards=2, workers=2))
    recorder.run(Settings(sync="ssp", shards=2, workers=2), Settings(sync="bsp", shards=2, workers=1))
    show(recorder.walks)
