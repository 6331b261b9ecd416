"""Who reaches a port of a run and is not one of its members: what it says changes nothing, and is named."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zmq
from kit.hostile_connections import OURS, noise, shaken
from kit.one_port import DIRECTLY
from kit.processes import Worker, serving, trained_alone, until
from kit.scripts import distance, flat

from narrows.compression import codecs
from narrows.protocols import messages as m
from narrows.protocols.addresses import local_endpoint
from narrows.protocols.runtime.network import shared_memory
from narrows.protocols.runtime.network.shared_memory import LEAST_BYTES
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.protocols.runtime.network.socks_dialler import SocksDialler
from narrows.protocols.wire import MAGIC, VERSION, decode, encode

LIMIT_MS = 10_000


def test_frames_that_begin_as_ours_do_are_of_this_version() -> None:
    assert MAGIC + bytes((VERSION,)) == OURS


def said(port: int, messages: Sequence[m.Message], shard: int = -1) -> list[m.Message]:
    """Send these messages as a stranger, and return the answers. `shard`: of those behind one port."""
    context, by = zmq.Context(), None
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        by = SocksDialler(f"127.0.0.1:{port}", f"shard-{shard}") if shard >= 0 else None
        dealer.connect(by.endpoint if by is not None else f"tcp://127.0.0.1:{port}")
        heard = []
        for message in messages:
            dealer.send_multipart(encode(message))
            assert dealer.poll(LIMIT_MS), f"no answer to {message}"
            heard.append(decode(dealer.recv_multipart()))
        return heard
    finally:
        context.destroy(0)
        if by is not None:
            by.close()


def linked(stack: ExitStack, port: int) -> tuple[Sockets, str]:
    """Return a stranger that shares memory with a shard, and the address of the shard."""
    made, address = stack.enter_context(closing(Sockets(known_as=lambda address: b"stranger"))), local_endpoint(port)
    made.send(address, [b"hello"])
    answers = list[object]()

    def ready() -> bool:
        answers.extend(made.receive(5))
        return bool(answers) and any(link.ready for link in made.memory.links.values())

    until(ready, "a link, and an answer")
    return made, address


def said_in_memory(port: int, messages: Sequence[m.Message]) -> list[m.Message]:
    """As `said`; each payload lies in the stranger's memory."""
    heard = list[m.Message]()
    with ExitStack() as stack:
        stranger, address = linked(stack, port)
        for message in messages:
            assert not stranger.send(address, encode(message)).dropped

        def answered() -> bool:
            heard.extend(decode(frames) for _, frames in stranger.receive(50))
            return len(heard) == len(messages)

        until(answered, "the answers")
        carried = sum(len(encode(message)) == 2 for message in messages)
        assert carried == stranger.memory.links[address].sequence > 0
    return heard


@pytest.mark.parametrize(
    ("sync", "says", "flags"),
    [("bsp", said, ()), ("ssp", said, ()), ("bsp", said_in_memory, ()), ("bsp", said, ("--one-port",))],
)
def test_nobody_speaks_for_a_worker_but_itself(
    sync: str,
    says: Callable[..., list[m.Message]],
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows all numbers: worker, epoch, clock, keys. The run ends as if it had not been there."""
    monkeypatch.setattr(shared_memory, "LEAST_BYTES", 1)
    with serving("--sync", sync, "--shards", "2", *flags) as server:
        worker = Worker(server.address)
        worker.train(5)
        member, clock = worker.session.link.member, worker.clock
        who: dict[str, Any] = {"worker": member.worker, "epoch": member.epoch}
        ports = member.ports
        for shard, exchange in enumerate(cast(Any, worker.engine.sync).shards.exchanges):
            begin, end = exchange.replica.begin, exchange.replica.end
            huge = np.full(end - begin, 1e30, np.float32)
            push = m.Push(**who, clock=clock, part=0, parts=1, begin=begin, end=end, samples=1, hyper=b"", codec=codecs.RAW,
                          payload=huge.tobytes())  # fmt: skip
            forged: list[m.Message] = [
                push,
                m.Pull(**who, request=99, clock=0),
                m.Follow(**who, clock=9, have=0, credit=1),
            ]
            if not shard:
                forged += [
                    m.Heartbeat(**who, sent_ns=1, ended=True),
                    m.Declare(member.worker, member.epoch, member.plan, "tcp://10.0.0.1:1"),
                    m.Buffers(**who, clock=0, payload=b"none"),
                    m.BuffersRequest(**who, clock=0),
                    m.RangeRequest(**who, number=1, clock=0, holds=0, samples=9, size=3, limit=3),
                ]
            for answer in says(ports[shard], forged) if not flags else says(server.port, forged, shard):
                assert isinstance(answer, m.Refuse) and "not from worker 0" in answer.text
        worker.train(7)
        worker.engine.finish()
        until(lambda: server.command.process.poll() is not None, "the run to end")
        assert "is not from worker 0, whose number it has" in server.command.out
        if sync == "bsp":
            assert distance(flat(worker.model), trained_alone(12)) < 1e-6
        assert np.isfinite(flat(worker.model)).all()


@pytest.mark.parametrize("one_port", [False, True])
def test_silent_connections_and_random_frames_take_nothing_from_the_others(one_port: bool, tmp_path: Path) -> None:
    """More connections than the server has descriptors. Who is ours gets in, and checkpoints are written."""
    flags = ["--sync", "ssp", "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "0.1", "--insecure"]
    flags += ["--one-port", "--shards", "2"] if one_port else []
    with serving(*flags, descriptors=1024, host="0.0.0.0") as server, ExitStack() as stack:
        rng = random.Random(0)

        for number in range(20):
            made = stack.enter_context(shaken(server.port, number % 3 - 1 if one_port else DIRECTLY))
            made.sendall(b"".join(noise(rng, kind) for kind in ("noise", "ours") for _ in range(50)))
        stranger, address = linked(stack, server.port)
        for _ in range(100):
            stranger.send(address, [OURS + rng.randbytes(30), rng.randbytes(LEAST_BYTES)])
        # The oldest connections are ended first: these must have been read.
        until(lambda: "too many messages that were refused" in server.command.out, server.command)
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        worker = Worker(f"tcp://127.0.0.{2 if one_port else 1}:{server.port}", rate=0.001)
        worker.train(40)
        until(lambda: "checkpoint of clock" in server.command.out, "a checkpoint")
        worker.close()
        assert server.command.wait() == 0, server.command
        said = server.command.out + server.command.err
    assert distance(flat(worker.model), trained_alone(40, 0.001)) < 1e-5
    for text in (
        "was ended: too many connections" if one_port else "without an accepted message",
        "too many messages that were refused",
        "does not speak the Narrows protocol",
    ):
        most = 2 * (1 + one_port)  # as it happened, and its count at the end, of each shard
        assert 1 <= said.count(text) <= most, said
    assert "Traceback" not in said and len(said) < 20_000 and (tmp_path / "kept" / "model.safetensors").exists()
