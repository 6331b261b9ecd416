"""Bad messages from a peer end its session with a named error and change no state (design: invariants).

Real runs, in which every message is followed by forged copies of it: fields at their extremes, packed fields and payloads
with bytes changed. They go to a copy of the machine that would have got them. NARROWS_TEST_SEED replays a run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from kit.in_process import Cluster
from kit.scripts import build, loss_of, run
from kit.seed import SEED

from narrows.compression import parse
from narrows.protocols import messages as m
from narrows.protocols.effects import StateArrived
from narrows.protocols.errors import NarrowsError, RemoteProtocolError
from narrows.protocols.modes import Settings
from narrows.protocols.wire import decode, encode, pack
from narrows.ps.server import Server
from narrows.ps.store import Store, check_payload
from narrows.worker import DistributedOptimizer
from narrows.worker.runner import Link

FORGED = 30  # of each message
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


def forged(message: Any, rng: random.Random) -> Iterator[m.Message]:
    """Copies of `message` that pass as messages and differ in one to three fields."""
    if isinstance(message, m.Push) and message.hyper and message.clock == 0:
        yield from (replace(message, hyper=packed) for packed in PACKED)
    made = 0
    while made < FORGED:
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


def state_of(server: Server) -> tuple[Any, ...]:
    """What a refused message may not have changed."""
    shard, coordinator = server.shard, server.coordinator
    store = shard.store
    arrays = [] if store is None else [array.tobytes() for array in store.arrays().values()]
    seats = [(i.worker, i.clock, sorted(i.partial)) for i in shard.inboxes.values()]
    who = [] if coordinator is None else [(s.worker, s.epoch, s.phase) for s in coordinator.seats.values()]
    arrived = [] if coordinator is None else [list(p.arrived) for p in coordinator.rounds.progress.values()]
    return arrays, seats, shard.min_clock, sorted(shard.held), who, arrived


class Hostile(Cluster):
    """A cluster with a peer that forges."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self.rng = rng
        self.refused = self.taken = 0
        super().__init__(settings)

    def send(self, link: Any, shard: int, frames: list[bytes]) -> None:
        server = self.servers[shard]
        for fake in forged(decode(frames), self.rng):
            victim = copy.deepcopy(server)
            before = state_of(victim)
            try:
                victim.handle(b"%d.%d" % (id(link), shard), fake, self.now())
                while victim.inner:
                    victim.advance(self.now())
                self.taken += 1
                continue
            except NarrowsError as error:
                self.refused += 1
                text = str(error)
            assert state_of(victim) == before, f"{fake} was refused ({text}), yet it changed the state"
            assert "\n" not in text and len(text) < 500
        super().send(link, shard, frames)


@pytest.mark.parametrize("settings", [
    Settings(sync="bsp", workers=2, shards=2),
    Settings(sync="bsp", compress="topk:0.1", shards=2),
    Settings(sync="ssp", workers=2, shards=2, compress="topk:0.1+int8"),
    Settings(sync="async", push="gradient"),
    Settings(sync="ssp", compress="lz4", compress_down="int8"),
    Settings(sync="local", local_steps=2, workers=2),
], ids=lambda s: f"{s.sync} {s.compress} {s.push}")  # fmt: skip
def test_a_server_survives_what_a_worker_may_send(settings: Settings) -> None:
    print(f"NARROWS_TEST_SEED={SEED}")
    rng = random.Random(f"{SEED} {settings}")

    def script(worker: int) -> None:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=1e-2), net)
        for step in range(STEPS * settings.mode().local_steps if settings.local_steps > 0 else STEPS):
            optimizer.zero_grad()
            loss_of(net, step, worker, settings.workers).backward()
            optimizer.step()
        optimizer.finish()

    cluster = Hostile(settings, rng)
    with run(settings, cluster) as started:
        started.together(script)
    assert cluster.refused > 20 and cluster.taken > 20
    for server in cluster.servers:
        assert server.shard.store is not None and np.isfinite(server.shard.store.x).all()


@pytest.mark.parametrize("spec", ["raw", "lz4", "fp16", "topk:0.5+bf16"])
def test_nan_is_refused_where_the_downlink_cannot_code_it(spec: str) -> None:
    """Else the shard itself would fail, when it publishes."""
    values = np.linspace(1.0, 2.0, 100, dtype=np.float32)
    itemsize = 4 if spec in ("raw", "lz4") else 2
    payload = bytearray(values.tobytes() if spec == "raw" else parse("dense" if spec == "lz4" else spec).encode(values))
    codec = m.RAW_FLOAT32 if spec == "raw" else m.CODED
    check_payload(SimpleNamespace(begin=0, end=100, codec=codec, payload=payload), finite=True)
    begin = 0 if spec == "raw" else 16
    payload[begin : begin + itemsize] = b"\xff" * itemsize
    check_payload(SimpleNamespace(begin=0, end=100, codec=codec, payload=payload), finite=False)
    with pytest.raises(RemoteProtocolError, match="NaN or infinity"):
        check_payload(SimpleNamespace(begin=0, end=100, codec=codec, payload=payload), finite=True)


def test_a_low_rank_payload_whose_product_overflows_is_refused_likewise() -> None:
    payload = bytearray(parse("powersgd:1").encode(np.linspace(1.0, 2.0, 100, dtype=np.float32)))
    check_payload(SimpleNamespace(begin=0, end=100, codec=m.CODED, payload=payload), finite=True)
    payload[16 : 16 + 80] = np.full(20, 1e20, np.float32).tobytes()  # finite factors
    check_payload(SimpleNamespace(begin=0, end=100, codec=m.CODED, payload=payload), finite=False)
    with pytest.raises(RemoteProtocolError, match="NaN or infinity"):
        check_payload(SimpleNamespace(begin=0, end=100, codec=m.CODED, payload=payload), finite=True)


@pytest.mark.parametrize("spec", ["int8", "topk:0.1", "powersgd:2"])
def test_a_state_that_overflows_is_published_whole(spec: str) -> None:
    """Finite updates may have a sum that is not: whoever trains sees it, as with a dense downlink, and the shard lives on."""
    store = Store(0, 1_000, barrier=False, compress_down=spec)
    store.restart(np.zeros(1_000, np.float32), np.zeros(1_000, np.float32), 0)
    update = np.full(1_000, 3e38, np.float32)
    update[::3] = 1.0
    part = SimpleNamespace(begin=0, end=1_000, codec=m.RAW_FLOAT32, payload=update.tobytes())
    for _ in range(3):
        store.fold_update([part], 1.0)
        store.publish()
        np.testing.assert_array_equal(store.p, store.x) if np.isinf(store.x).any() else None
    assert store.publication == 3 and np.isinf(store.p[1]) and store.p[0] == 3.0
    assert store.since(1) is None


def pieces(size: int) -> dict[str, list[dict[str, Any]]]:
    """Answers to a pull that are none, as changes of a good one of keys [0, size)."""
    half = size // 2
    short = np.zeros(size - 1, np.float32).tobytes()
    whole = np.zeros(size, np.float32).tobytes()
    return {
        "no values": [{"payload": b""}],
        "a value short": [{"payload": short}],
        "a byte too many": [{"payload": whole + b"\0"}],
        "coded": [{"codec": m.CODED}],
        "unknown codec": [{"codec": 77}],
        "outside": [{"begin": 1, "end": size + 1}],
        "reversed": [{"begin": size, "end": 0}],
        "half of the keys": [{"end": half, "payload": whole[: 4 * half]}],
        "twice": [{}, {}],
        "garbled difference": [{"delta": True, "codec": m.CODED, "payload": b"\1" * 40}],
        "difference of some keys": [{"delta": True, "end": half, "payload": b""}],
    }


@pytest.mark.parametrize("what", pieces(8))
@pytest.mark.parametrize("master", [False, True])
def test_a_worker_takes_no_state_that_is_none(what: str, master: bool) -> None:
    with run(Settings(sync="ssp", compress="topk:0.5")):
        net = build()
        engine = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)._engine
        assert engine is not None
        size = engine.flat.size
        before = engine.pulled.copy()
        good = m.State(
            *(engine.worker, engine.epoch, 1, 0, 1, 0, size, False, 1, 0, 0, (), 0, 0, m.RAW_FLOAT32),
            np.ones(size, np.float32).tobytes(),
        )
        parts = tuple(replace(good, **changes) for changes in pieces(size)[what])
        with pytest.raises(RemoteProtocolError):
            engine._handle(StateArrived(0, 0, master, parts))
        if len(parts) == 1:
            assert np.array_equal(engine.pulled, before)
        engine._handle(StateArrived(0, 0, False, (good,)))
        assert (engine.pulled == 1).all()


def test_a_worker_whose_server_talks_nonsense_is_told_and_ends() -> None:
    """Its I/O thread is gone: what is asked of it, however often, and the end must not wait for it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        link = Link(f"tcp://127.0.0.1:{port}", "token", "here", b"")
        assert server.poll(10_000)
        server.send_multipart([server.recv_multipart()[0], b"nonsense"])
        with pytest.raises(RemoteProtocolError, match=r"127\.0\.0\.1"):
            link.take(10.0)
        for _ in range(5_000):  # more than a queue of ZeroMQ holds
            link.call(lambda member, now: [])
        link.close()
