"""Bad messages from a peer end its session with a named error and change no state (design: invariants).

Real runs, in which every message is followed by forged copies of it: fields at their extremes, packed fields and payloads
with bytes changed. They go to a copy of the machine that would have got them. NARROWS_TEST_SEED replays a run.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from kit.in_process import Cluster, store_of
from kit.ports import Ports, SharedPorts
from kit.scripts import build, flat, loss_of, run, train, tree
from kit.seed import SEED
from kit.specs import VALUE_STAGES, same_bits
from kit.virtual_time import Script, finished
from numba.core.dispatcher import Dispatcher

from narrows.compression import ladder, parse
from narrows.compression.codecs import CODED, RAW, Piece
from narrows.compression.compressor import Chain
from narrows.compression.value_codings import Section
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.retry import Retry
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import MasterArrived, Send, SendToPeer, ServerEffect, StateArrived
from narrows.protocols.errors import NarrowsError, RemoteProtocolError
from narrows.protocols.wire import decode, encode, pack
from narrows.ps.parent.parent_gossip import ParentGossip
from narrows.ps.server.server import Server
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.push_assembler import check_part
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.store.changes import Fold, LoadArrays, Publish
from narrows.ps.store.store import Store
from narrows.worker import DistributedOptimizer
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.updates import UpdateStep

copyreg.pickle(
    memoryview, lambda view: (memoryview, (bytes(view),))
)  # so that machines that hold messages can be copied

FORGED = 10  # of each message of a worker; between two levels there are more messages, and more servers to copy
STEPS = 4
NAN = float("nan")
INTS = (-1, 0, 1, 2, 7, 1 << 16, m.CLOCK_MAX + 1, (1 << 63) - 1)
INF = float("inf")
GROUPS: tuple[object, ...] = (
    *(
        None,
        [],
        [1],
        [{}],
        [{"lr": "x"}],
        [{"lr": NAN}],
        [{"lr": None}],
        [{"lr": [1.0]}],
        [{"lr": {}}],
        [{"lr": 10**19}],
    ),
    *(
        [{"lr": 1.0, "momentum": -1.0}],
        [{"lr": True, "foreach": True, "fused": True}],
        [{"lr": 0.1, "capturable": True}],
    ),
    *([{"betas": [0.9]}], [{"lr": 0.1, "betas": [0.9, None]}], [{"lr": 0.1, "maximize": "yes"}], [{"self": 1}]),
    *([{"lr": 0.1, "weight_decay": "x"}], [{"lr": 0.1, "nesterov": True}], [{"params": []}]),
)
ABSENT: tuple[object, ...] = ([[1]], ["x"], [None], [1.5], [1 << 60], [-1], 3, {})
PACKED = (
    *(b"", b"\xc0", b"\x80", b"\x81\x90\x00", pack([]), pack({}), pack([1, 2]), pack([b"", 3]), pack([b"", ["x"]])),
    *(pack([b"", [0.5]]), pack([b"", [1 << 60]]), pack([b"", [INF]])),
    *(pack([pack(groups), []]) for groups in GROUPS),
    *(pack([pack([{"lr": 0.1}]), absent]) for absent in ABSENT),
)


def forged(message: Any, rng: random.Random, count: int) -> Iterator[m.Message]:
    """Copies of `message` that pass as messages and differ in one to three fields."""
    if isinstance(message, m.Push) and message.hyper and message.clock == 0:
        yield from (replace(message, hyper=packed) for packed in PACKED)
    made = 0
    while made < count:
        changes: dict[str, Any] = {}
        for field in rng.sample(fields(message), min(len(fields(message)), rng.choice((1, 1, 1, 2, 3)))):
            value = getattr(message, field.name)
            match str(field.type):
                case "int":
                    changes[field.name] = rng.choice((*INTS, max(-1, value - 1), min(value + 1, INTS[-1])))
                case "bool":
                    changes[field.name] = not value
                case "float":
                    changes[field.name] = rng.choice((NAN, float("inf"), -1.0, 0.0))
                case "str":
                    changes[field.name] = rng.choice(("", "x", value + "x"))
                case "bytes" | "Buffer":
                    data = bytearray(value)
                    match rng.randrange(5):
                        case 0:
                            data = data[: rng.randrange(len(data) + 1)]
                        case 1:
                            data += rng.randbytes(rng.choice((1, 4)))
                        case 2:
                            data = bytearray(rng.choice(PACKED))
                        case _ if data:
                            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    changes[field.name] = bytes(data)
                case "Ints" | "Pairs" | "Triples" | "Quads" | "Weights" | "Sets":
                    changes[field.name] = rng.choice(((), value[1:], value + value[:1]))
        made += 1
        copied: m.Message = replace(message, **changes)
        yield decode([bytes(frame) for frame in encode(copied)])


UNCHANGING = (
    *(ModelSpec, Mode, Settings, Timing, Retry, m.Ledger, m.Report, m.Follow, Chain, Section, Dispatcher),
    *(FunctionType, ModuleType),
)


class Copies:
    """Copies of all servers of a cluster as they are now; the copies share the objects that never change."""

    def __init__(self, servers: list[Server]) -> None:
        self.shared: dict[int, Any] = {}
        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._shared  # type: ignore[method-assign]
        pickler.dump(servers)
        self.written = file.getvalue()

    def _shared(self, found: Any) -> int | None:
        if not isinstance(found, UNCHANGING):
            return None
        self.shared[id(found)] = found
        return id(found)

    def make(self) -> list[Server]:
        unpickler = pickle.Unpickler(io.BytesIO(self.written))
        unpickler.persistent_load = self.shared.__getitem__  # type: ignore[method-assign]
        copied: list[Server] = unpickler.load()
        return copied


def state_of(server: Server) -> tuple[Any, ...]:
    """The state that a refused message may not have changed."""
    shard, coordinator = server.shard, server.coordinator
    planned = shard.model_shard
    model: tuple[Any, ...] = ()
    if planned is not None:
        held = planned.folding.held if isinstance(planned.folding, FoldAtBarrier) else {}
        children = {worker: (c.follow, sorted(c.sent), c.pull) for worker, c in planned.publications.children.items()}
        arrays = [array.tobytes() for array in planned.store.arrays().values()]
        model = (planned.plan, arrays, planned.stage, planned.parent_slot.finishes, sorted(held), children)
    seats = [(i.worker, i.clock, i.taken, sorted(i.partial)) for i in shard.assembler.seats.values()]
    who = [] if coordinator is None else [(s.worker, s.epoch, s.phase) for s in coordinator.seats.values()]
    arrived = [] if coordinator is None else [list(p.arrived) for p in coordinator.clocks.progress.values()]
    above = shard.parent_slot.link
    mixes = []
    if isinstance(above, ParentGossip):
        weights = b"" if not above.driver.has_model else above.driver.mixing.model.tobytes()
        mixes = [above.driver.phase, above.driver.round, sorted(above.driver.exchanges.pairs), weights]
    return model, seats, shard.min_clock, shard.trouble, who, arrived, mixes


class Tally:
    """Counts forged messages, of which there are `count` for each true one."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self.rng, self.count = rng, count
        self.refused = self.taken = 0


class Hostile(Cluster):
    """Servers with peers that forge: workers, clusters below, the server above, clusters that gossip with this one."""

    def __init__(
        self,
        settings: Settings,
        tally: Tally,
        parent: Cluster | None = None,
        name: str = "cluster",
        ports: Ports | None = None,
    ) -> None:
        self.tally = tally
        super().__init__(settings, parent, name, ports)

    def arrive(self, shard: int, peer: bytes, message: m.Message) -> None:
        def take(server: Server, fake: m.Message) -> list[ServerEffect]:
            return server.handle(peer, fake, self.now())

        if peer != COORDINATOR and not peer.startswith(b"shard-"):  # what the servers of one cluster say is their own
            self._forge(shard, message, take, partial(self._again, peer, shard))
        super().arrive(shard, peer, message)

    def arrive_above(self, shard: int, message: m.Message) -> None:
        def take(server: Server, fake: m.Message) -> list[ServerEffect]:
            return server.handle_above(fake, self.now())

        self._forge(shard, message, take, ends=True)
        super().arrive_above(shard, message)

    def _again(self, peer: bytes, shard: int, fake: m.Message) -> list[m.Message]:
        """Return a worker's message as it comes through shared memory, if it does."""
        if peer not in self.links or not isinstance(self.ports, SharedPorts):
            return []
        return [self.carried(self.links[peer][0], shard, encode(fake))[0]]

    def _forge(
        self,
        shard: int,
        message: m.Message,
        take: Callable[[Server, m.Message], list[ServerEffect]],
        again: Callable[[m.Message], list[m.Message]] = lambda fake: [],
        ends: bool = False,
    ) -> None:
        """Copies of all servers here take copies of a message, and all that follows from it. `again`: other forms of a message,
        which must meet with the same. `ends`: whoever says it is trusted with the end of this cluster, and only with that. The
        copies that refused a message take the next one."""
        copies, before = Copies(self.servers), state_of(self.servers[shard])
        victims: list[Server] = []
        for fake in forged(message, self.tally.rng, self.tally.count):
            answers = set[str]()
            for form in (fake, *again(fake)):
                victims = victims or copies.make()
                try:
                    effects = take(victims[shard], form)
                    self.tally.taken += 1
                    answers.add("")
                except NarrowsError as error:
                    self.tally.refused += 1
                    text = str(error)
                    answers.add(text)
                    assert "\n" not in text and 0 < len(text) < 500
                    assert ends or state_of(victims[shard]) == before, (
                        f"{form} was refused ({text}), yet it changed the state"
                    )
                    if not ends:
                        continue
                    effects = victims[shard].fail_above(text, self.now())
                self._follow(victims, shard, effects)
                victims = []
            assert len(answers) == 1, f"{fake} meets with {answers}"

    def _follow(self, victims: list[Server], shard: int, effects: list[ServerEffect]) -> None:
        """Take all effects, and hand on what the servers of one cluster say to each other."""
        queue = deque([(shard, effects)])
        while queue:
            shard, effects = queue.popleft()
            for effect in effects:
                if isinstance(effect, (Send, SendToPeer)):
                    encode(effect.message)
                if not isinstance(effect, Send) or isinstance(effect.peer, int):
                    continue
                message = decode([bytes(frame) for frame in encode(effect.message)])
                if effect.peer == COORDINATOR:
                    queue.append((0, victims[0].handle(b"shard-%d" % shard, message, self.now())))
                elif effect.peer.startswith(b"shard-"):
                    other = int(effect.peer[6:])
                    queue.append((other, victims[other].handle(COORDINATOR, message, self.now())))
            while victims[shard].inner:
                queue.append((shard, victims[shard].advance(self.now())))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def script(settings: Settings, workers: int, worker: int) -> None:
    net = build()
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for step in range(STEPS * max(1, settings.mode().local_steps)):
        optimizer.zero_grad()
        loss_of(net, step, worker, workers).backward()
        optimizer.step()
    optimizer.finish()


ONE_LEVEL = (
    Settings(sync="bsp", workers=2, shards=2),
    Settings(sync="bsp", compress="topk:0.1", shards=2),
    Settings(sync="bsp", push="update", workers=2),
    Settings(sync="ssp", workers=2, shards=2, compress="topk:0.1+int8"),
    Settings(sync="ssp", push="gradient", shards=2),
    Settings(sync="ssp", compress="lz4", compress_down="int8"),
    Settings(sync="ssp", compress="auto", compress_down="auto", shards=2),
    Settings(sync="async", push="gradient"),
    Settings(sync="async", compress="cycle:0.5/0.3+sign", workers=2, shards=2),
    Settings(sync="local", local_steps=2, staleness=0, quorum=1, grace=0.1, workers=2),
    Settings(sync="local", local_steps=2, fragments=2, compress="topk:0.3", workers=2, shards=2),
    Settings(sync="gossip", topology="ring", workers=2, shards=2),
)
PUSHED = Settings(sync="bsp", shards=2)
TWO_LEVELS = (
    (Settings(sync="bsp", push="update", workers=2, shards=2), PUSHED),
    (Settings(sync="ssp", compress="topk:0.2+int8", workers=2, shards=2), Settings(sync="async", shards=2)),
    (Settings(sync="local", local_steps=2, workers=2), Settings(sync="ssp")),
    (Settings(sync="gossip", topology="matching", staleness=0, workers=2, shards=2), PUSHED),
    (Settings(sync="gossip", compress="topk:0.2", workers=2), Settings(sync="local", local_steps=2)),
)


def check(tally: Tally, *clusters: Cluster) -> None:
    print(f"NARROWS_TEST_SEED={SEED}: {tally.refused} refused, {tally.taken} taken")
    assert tally.refused > 20 and tally.taken > 20
    for cluster in clusters:
        for server in cluster.servers:
            assert np.isfinite(store_of(server).x).all()


@pytest.mark.parametrize("way", [Ports, SharedPorts])
@pytest.mark.parametrize("settings", ONE_LEVEL, ids=lambda s: f"{s.sync} {s.compress} {s.push}")
def test_a_server_survives_what_a_worker_may_send(settings: Settings, way: type[Ports]) -> None:
    """Each message comes as a copy. Through shared memory it comes that way too, and must meet with the same answer."""
    tally = Tally(random.Random(f"{SEED} {settings}"), FORGED if way is Ports else FORGED // 2)
    with closing(way()) as ports:
        cluster = Hostile(settings, tally, ports=ports)
        with run(settings, cluster) as started:
            started.together(lambda worker: script(settings, settings.workers, worker))
    check(tally, cluster)


@pytest.mark.parametrize(("above", "below"), TWO_LEVELS, ids=lambda s: f"{s.sync} {s.compress}")
def test_servers_of_two_levels_survive_what_the_other_level_may_send(above: Settings, below: Settings) -> None:
    tally = Tally(random.Random(f"{SEED} {above}"), FORGED // 2)
    root = Hostile(above, tally)
    clusters = [Hostile(below, tally, root, f"cluster{index}") for index in range(2)]
    with tree(root, *clusters) as started:
        scripts = [Script(started, worker, partial(script, below, 2, worker)) for worker in range(2)]
        finished(started, [root, *clusters], *scripts, real_s=300.0)
    check(tally, root, *clusters)


# A worker that writes to its memory once its push has arrived.


CODED_SPECS = (
    *VALUE_STAGES,
    "lz4",
    "topk:0.2",
    "mstopk:0.2+int8",
    "randk:0.2+bf16",
    "threshold:1.0",
    "cycle:0.5/0.3+sign",
)
BEHIND_A_BARRIER: tuple[dict[str, Any], ...] = ({"sync": "bsp"}, {"sync": "bsp", "push": "update"}, {"sync": "local"})


@pytest.mark.parametrize(("flags", "spec"), [*zip(cycle(BEHIND_A_BARRIER), CODED_SPECS, strict=False)], ids=str)
def test_a_coded_push_that_changes_while_it_waits_changes_nothing(flags: dict[str, Any], spec: str) -> None:
    """It waits at the barrier for that of the other worker."""
    rng, models = np.random.default_rng(SEED), list[Any]()
    settings = Settings(**flags, compress=spec, workers=2, shards=2)

    def spoil(worker: Any, payload: Any) -> None:
        payload[:] = rng.integers(0, 256, payload.size, np.uint8)

    for ports in (Ports(), SharedPorts(spoil)):
        with closing(ports), run(settings, Cluster(settings, ports=ports)) as started:
            models += started.together(lambda worker: train(STEPS, sgd))
    assert all(same_bits(model, models[0]) for model in models)


@pytest.mark.parametrize("value", [NAN, INF, 1e30, 1e-9])
@pytest.mark.parametrize("flags", [{"sync": "bsp"}, {"sync": "local", "outer_lr": 1.0, "outer_momentum": 0.0}], ids=str)
def test_raw_values_that_change_while_they_wait_spoil_their_own_share_alone(
    flags: dict[str, Any], value: float
) -> None:
    """What is longer by then, or not finite, is left out. Else it is folded as it is: the shard reads it where it lies."""
    pushes, spoilt = threading.Event(), threading.Event()
    settings = Settings(**flags, workers=2, local_steps=1)

    def spoil(worker: Any, payload: Any) -> None:
        if pushes.is_set() and worker.member.worker == 1:
            payload.view(np.float32)[:] = value
            spoilt.set()

    def each(worker: int) -> Any:
        net = build()
        optimizer = DistributedOptimizer(sgd(net), net)
        loss_of(net, worker).backward()
        if worker == 1:
            pushes.set()
        assert worker == 1 or spoilt.wait(10.0)
        optimizer.step()
        optimizer.finish()
        return flat(net)

    with closing(SharedPorts(spoil)) as ports, run(settings, Cluster(settings, ports=ports)) as started:
        models = started.together(each)
    alone = build()
    loss_of(alone, 0).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1 / 2).step()
    assert np.array_equal(models[0], models[1])
    np.testing.assert_allclose(models[0], flat(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", ["raw", "lz4", "fp16", "topk:0.5+bf16"])
def test_nan_is_found_in_whatever_carries_it(spec: str) -> None:
    values = np.linspace(1.0, 2.0, 100, dtype=np.float32)
    itemsize = 4 if spec in ("raw", "lz4") else 2
    payload = bytearray(values.tobytes() if spec == "raw" else parse("dense" if spec == "lz4" else spec).encode(values))
    codec = RAW if spec == "raw" else CODED
    assert 100 < check_part(first_weights(codec, payload), (0, 100)) < 500
    begin = 0 if spec == "raw" else 16
    payload[begin : begin + itemsize] = b"\xff" * itemsize
    assert check_part(first_weights(codec, payload), (0, 100)) == math.inf


def first_weights(codec: int, payload: m.Buffer) -> m.FirstWeights:
    """The first weights of keys [0, 100)."""
    return m.FirstWeights(0, 1, 0, 1, 0, 100, codec, payload)


@pytest.mark.parametrize("spec", ["int8", "topk:0.1", "cycle:0.5/0.3"])
def test_a_state_that_overflows_is_published_whole(spec: str) -> None:
    """Finite updates may have a sum that is not: whoever trains sees it, as with a dense downlink, and the shard lives on."""
    store = Store(0, 1_000, barrier=False, codings=ladder(spec))
    zeros = np.zeros(1_000, np.float32)
    store.apply(LoadArrays({"x": zeros, "p": zeros}, 0))
    update = np.full(1_000, 3e38, np.float32)
    update[::3] = 1.0
    piece = Piece(RAW, 0, 1_000, update.tobytes())
    for _ in range(3):
        store.apply(Fold(((1.0, [piece]),), ((0, 1.0),)))
        store.apply(Publish())
        np.testing.assert_array_equal(store.p, store.x) if np.isinf(store.x).any() else None
    assert store.publication == 3 and np.isinf(store.p[1]) and store.p[0] == 3.0
    assert not store.since(1)


def pieces(size: int) -> dict[str, list[dict[str, Any]]]:
    """States that are none, as changes of a good one of keys [0, size)."""
    half = size // 2
    short = np.zeros(size - 1, np.float32).tobytes()
    whole = np.zeros(size, np.float32).tobytes()
    return {
        "no values": [{"payload": b""}],
        "a value short": [{"payload": short}],
        "a byte too many": [{"payload": whole + b"\0"}],
        "coded": [{"codec": CODED}],
        "unknown codec": [{"codec": 77}],
        "outside": [{"begin": 1, "end": size + 1}],
        "reversed": [{"begin": size, "end": 0}],
        "half of the keys": [{"end": half, "payload": whole[: 4 * half]}],
        "twice": [{}, {}],
        "garbled difference": [{"whole": False, "add": True, "codec": CODED, "payload": b"\1" * 40}],
        "difference of some keys": [{"whole": False, "add": True, "end": half, "payload": b""}],
        "whole, and to be added": [{"add": True}],
    }


@pytest.mark.parametrize("what", pieces(8))
@pytest.mark.parametrize("master", [False, True])
def test_a_worker_takes_no_state_that_is_none(what: str, master: bool) -> None:
    with run(Settings(sync="ssp", compress="topk:0.5")):
        net = build()
        engine = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)._engine
        assert engine is not None and isinstance(engine.sync, UpdateStep)
        (exchange,) = engine.sync.shards.exchanges
        pulled, size = engine.sync.arrays.pulled, engine.flat.size
        before, payload = pulled.copy(), np.ones(size, np.float32).tobytes()
        good = m.State(
            *(exchange.worker, exchange.epoch, int(master), 0, 1, 0, size, True, False, 1, 0, 0, (), 0, RAW), payload
        )
        parts = tuple(replace(good, **changes) for changes in pieces(size)[what])
        with pytest.raises(RemoteProtocolError):
            engine._handle(MasterArrived(0, 0, parts) if master else StateArrived(0, parts))
        assert np.array_equal(pulled, before) and not exchange.shared
        engine._handle(StateArrived(0, (good,)))
        assert (pulled == 1).all()


def test_a_worker_whose_server_talks_nonsense_is_told_and_ends() -> None:
    """Its I/O thread is gone: what is asked of it, however often, and the end must not wait for it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        link = MemberLink(f"tcp://127.0.0.1:{port}", "token", "here", b"")
        assert server.poll(10_000)
        server.send_multipart([server.recv_multipart()[0], b"nonsense"])
        with pytest.raises(RemoteProtocolError, match=r"127\.0\.0\.1"):
            link.take(10.0)
        for _ in range(5_000):  # more than a queue of ZeroMQ holds
            link.call(lambda member, now: [])
        link.close()
