"""A process that copies a shard: whom it listens to, how it ends, and what it asks before there is one."""

from __future__ import annotations

import os
import pickle
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from simulation.actors import PLANS

from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import ELECTION_TIMEOUT_NS, REPLICATION_CUT_NS, STANDBY_LOST_LEASES
from narrows.protocols.effects import NS, StopProcess
from narrows.protocols.errors import (
    AuthenticationError,
    IncompatibleError,
    NarrowsError,
    RemoteProtocolError,
    ServerLostError,
    UnreachableError,
)
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.connections import Connection
from narrows.protocols.runtime.network.curve_auth import HandshakeFailure
from narrows.protocols.runtime.network.sockets import Peer, Receipt, Sockets
from narrows.protocols.wire import decode, encode, pack
from narrows.ps.command.shard_supervisor import ShardSupervisor
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.journal.machine_pickling import frozen, thaw
from narrows.ps.process import bootstrap_client
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.machine_factory import UNKNOWN, release
from narrows.ps.process.standby_runner import PLACE_NS, StandbyRunner
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.replication.standby import MachineParts
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ModelShard, ShardResources
from narrows.ps.shard.push_assembler import PushAssembler
from narrows.ps.shard.shard import Shard
from narrows.ps.store.store import assume_lent

SECRET = "secret-x"
ORIGINAL, FIRST, OTHER = "tcp://127.0.0.1:9", "tcp://127.0.0.1:8", "tcp://127.0.0.1:7"
OURS, WORKER = SECRET.encode() + b"1", b"a" * m.NAME_BYTES + b"x"
TICK = MachineEvent(EventKind.TICK, 5)
LEASE_NS = int(Settings().lease * NS)


class Wire:
    """In the place of sockets: what is sent, and turn after turn what comes, or happens."""

    def __init__(self) -> None:
        self.sent: list[tuple[Peer, m.Message]] = []
        self.turns: deque[Callable[[], list[tuple[Peer, m.Message]]]] = deque()
        self.watched: dict[int, Callable[[], object]] = {}

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        self.sent.append((to, decode(frames)))
        return Receipt()

    def receive(self, limit_ms: int) -> list[tuple[Peer, list[Buffer]]]:
        assert self.turns, "it waits for something that does not come"
        return [(peer, encode(message)) for peer, message in self.turns.popleft()()]

    def watch(self, fd: int, called: Callable[[], object]) -> None:
        self.watched[fd] = called

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def close(self) -> None: ...


class Time:
    """In the place of a clock."""

    now_ns = 0

    def now(self) -> int:
        return self.now_ns

    turn = now


class Life:
    """A process that follows shard `index` of two."""

    def __init__(self, index: int = 0) -> None:
        self.wire, self.time = Wire(), Time()
        settings = Settings(shards=2).validated()
        first = FIRST if index else ""
        config = ServerConfig(
            index, settings, "tcp://127.0.0.1:0", first, 1, "", False, secret=SECRET, follows=ORIGINAL
        )
        gate = AccessControl("", "", SECRET, first, ORIGINAL)
        self.follower = StandbyRunner(config, cast(Sockets, self.wire), 4711, gate)
        self.follower.clock = cast(Any, self.time)
        assert self.follower.standby.heard_ns > 0, "the time of its original begins now"
        self.follower.standby.heard_ns = 0
        self.standby = self.follower.standby

    def machine(self, stands_by: bool = True) -> bytes:
        """The machine of the server that it copies, frozen."""
        settings = Settings(shards=2).validated()
        index = self.follower.config.index
        coordinator = Coordinator(settings, 7) if not index else None
        server = Server(Shard(index, settings, 1, 5, (), ShardResources(coordinator=coordinator)), coordinator)
        server.view, server.standby = 1, self.standby.address if stands_by else ""
        return frozen(server, assume_lent)

    def has_all(self) -> None:
        self.hear(ORIGINAL, m.ReplicationEntry(1, 0, 0, 1, b"", 0, b"", self.machine()))
        assert self.standby.stands_by

    def hear(self, peer: Peer, message: m.Message) -> None:
        self.follower._receive(peer, encode(message))

    def loop(self) -> bool:
        return self.follower.loop(cast(Sockets, self.wire))

    def silence(self, ns: int) -> Callable[[], list[tuple[Peer, m.Message]]]:
        def passes() -> list[tuple[Peer, m.Message]]:
            self.time.now_ns += ns
            return []

        return passes


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a pipe that is this process's stdin."""
    ours, theirs = os.pipe()
    with open(ours) as file:
        monkeypatch.setattr("sys.stdin", file)
        yield theirs
    with suppress(OSError):
        os.close(theirs)


def test_it_takes_events_of_its_original_alone() -> None:
    life = Life(1)
    machine = m.ReplicationEntry(1, 4, 0, 1, b"", 0, b"", life.machine())
    for peer in (FIRST, OTHER, OURS):
        life.hear(peer, machine)
        assert life.standby.machine is None
    life.hear(ORIGINAL, machine)
    assert life.standby.have == 4 and life.follower.access_control.machine is life.follower.server
    for peer in (FIRST, OTHER):
        life.hear(peer, m.Refuse(5, -1, 0, "no"))
    with pytest.raises(NarrowsError, match=": no"):
        life.hear(ORIGINAL, m.Refuse(5, -1, 0, "no"))


def test_it_waits_for_the_place_of_a_standby_that_may_be_its_own_earlier_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    life = Life()
    taken = m.Refuse(m.RefuseCode.TAKEN, -1, 0, "another server stands by already, at tcp://127.0.0.1:6")
    limit_ns = PLACE_NS + 2 * life.standby.lost_ns
    for life.time.now_ns in range(NS, limit_ns, NS):
        life.hear(ORIGINAL, taken)
    assert life.standby.heard_ns == life.time.now_ns, "its server lives"
    assert capfd.readouterr().out.count("this one waits") == 1
    life.time.now_ns = limit_ns + 2 * NS
    with pytest.raises(NarrowsError, match="another server stands by already"):
        life.hear(ORIGINAL, taken)
    life = Life()
    life.hear(ORIGINAL, taken)
    life.has_all()
    life.time.now_ns = 10 * limit_ns
    life.hear(ORIGINAL, taken)  # it was given a place, and lost it again


class Calls:
    """Its pickle calls a function."""

    def __init__(self, called: Callable[..., object], *args: object) -> None:
        self.called, self.args = called, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.called, self.args


class Named:
    """Its pickle names something by module and name, as nobody would who can import it."""

    def __init__(self, module: str, name: str) -> None:
        self.raw = f"c{module}\n{name}\n.".encode()


def forged(tmp_path: Path) -> dict[str, bytes]:
    """What somebody may send who binds the port of a server that is gone."""
    there = str(tmp_path / "called")
    calls = {
        "a command": Calls(os.system, f"touch {there}"),
        "a file": Calls(os.open, there, os.O_CREAT),
        "an attribute": Calls(getattr, Calls(import_module, "os"), "system"),
        "a module": Calls(import_module, "this"),
        "a partial": Calls(partial, os.mkdir, there),
        "code": Calls(exec, f"open({there!r}, 'w')"),
        "an import of ours": Calls(emit, "log"),
        "a machine that is none": Calls(dict),
        "an array of objects": Calls(np.frombuffer, bytes(8), np.dtype("O")),
    }
    names = {
        "a kernel": Named("narrows.compression.kernels.cpu", "encode_int8"),
        "a function of ours": Named("narrows.protocols.wire", "unpack"),
        "what a module of ours imports": Named("narrows.ps.store.store", "np.load"),
        "the globals of a function": Named("narrows.ps.store.store", "Store.check.__globals__"),
        "what reads arrays": Named("numpy._core.multiarray", "_reconstruct"),
    }
    packed = {name: pickle.dumps(each, 2) for name, each in calls.items()}
    return packed | {name: each.raw for name, each in names.items()} | {"noise": b"\x80\x05noise", "nothing": b""}


def test_a_machine_that_calls_names_or_lacks_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    """Without keys anybody may bind the port of a server that is gone."""
    for name, packed in forged(tmp_path).items():
        life = Life()
        with pytest.raises(NarrowsError, match="none"):
            life.hear(ORIGINAL, m.ReplicationEntry(1, 0, 0, 1, b"", 0, b"", packed))
        assert life.standby.machine is None and not (tmp_path / "called").exists(), name


@pytest.mark.parametrize("wrong", [np.zeros(7, np.float64), np.zeros((7, 1), np.float32), np.zeros(3, np.float32)])
@pytest.mark.parametrize("name", ["x", "p"])
def test_a_machine_whose_arrays_do_not_fit_its_keys_is_refused(name: str, wrong: Any) -> None:
    """Kernels would read and write beyond them."""
    settings = Settings().validated()
    server = Server(
        Shard(0, settings, 1, 5, (), ShardResources(coordinator=Coordinator(settings, 7))), Coordinator(settings, 7)
    )
    server.shard.model_shard = ModelShard(
        0, settings, ModelSpec.unpacked(PLANS[0.0]), PushAssembler(0, settings.mode()), 0, ShardResources()
    )
    setattr(server.shard.model_shard.store, name, wrong)
    life = Life()
    with pytest.raises(NarrowsError, match="float32"):
        life.hear(ORIGINAL, m.ReplicationEntry(1, 0, 0, 1, b"", 0, b"", frozen(server, assume_lent)))


def test_it_takes_views_of_its_shard_0_and_words_of_its_shards_alone(capfd: pytest.CaptureFixture[str]) -> None:
    life = Life(1)
    life.has_all()
    life.hear(ORIGINAL, m.FailoverNotice(2, "", True))
    assert not life.follower.serves
    for said in (True, False):  # once
        life.hear(WORKER, m.ReplicationProgress(1, 1, "there:1", 5))
        assert not life.standby.siblings.known
        assert ("comes from the shards of this server alone" in capfd.readouterr().out) == said
    life.hear(ORIGINAL, m.ReplicationProgress(1, 1, "there:1", 5))
    assert not life.standby.siblings.known
    known = life.follower.access_control.connections.named[OURS] = Connection(-1, -1, OURS, refused=9)
    life.hear(OURS, m.ReplicationProgress(1, 1, "there:1", 5))
    assert life.standby.siblings.known and not known.refused
    life.hear(FIRST, m.FailoverNotice(2, "", True))
    assert [serve.view for serve in life.follower.serves] == [2]


def test_what_is_no_message_ends_it_where_its_server_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    life = Life()
    life.follower._receive(WORKER, [b"nonsense"])
    assert "does not speak" in capfd.readouterr().out
    with pytest.raises(RemoteProtocolError):
        life.follower._receive(ORIGINAL, [b"nonsense"])


def test_members_are_answered() -> None:
    life = Life()
    life.hear(WORKER, m.Hello("token", "here"))
    ((to, refusal),) = life.wire.sent
    assert to == WORKER and isinstance(refusal, m.Refuse) and f"give --server {ORIGINAL}" in refusal.text
    life.hear(WORKER, m.FailoverVote(0, 1, 2, 1))
    assert life.wire.sent[1] == (WORKER, m.KeepServing(2, 1)), "the server lives"
    life.hear(ORIGINAL, m.FailoverVote(0, 1, 2, 2))
    life.hear(ORIGINAL, m.Hello("token", "here"))
    assert len(life.wire.sent) == 2


def test_a_checkpoint_of_its_original_is_not_here() -> None:
    """After the event that goes back to it there is nothing to go on with, and after others there is."""
    life = Life()
    life.has_all()
    life.follower._again(TICK)
    assert life.standby.machine is not None
    life.follower.replay.load(3)
    life.follower._again(TICK)
    assert life.standby.machine is None and not life.follower.stale


def test_the_run_is_over_with_its_machine() -> None:
    life = Life(1)
    assert not life.follower.over
    life.has_all()
    assert not life.follower.over
    life.follower.replay.stop = StopProcess()
    assert life.follower.over
    life.follower.replay.stop = None
    life.follower.server.shard.settings = Settings(shards=1).validated()
    assert life.follower.over, "its keys are with others"


@pytest.mark.parametrize("said", [b"stop\n", b""])
def test_it_stops_with_its_parent(said: bytes, stdin: int) -> None:
    life = Life()

    def speak(words: bytes) -> list[Any]:
        if words:
            os.write(stdin, words)
        else:
            os.close(stdin)
        (heard,) = life.wire.watched.values()
        heard()
        return []

    life.wire.turns += [partial(speak, b"\n"), partial(speak, said)]
    assert not life.loop() and not life.wire.watched and not life.wire.turns


def test_it_serves_once_half_of_the_members_say_so(stdin: int, capfd: pytest.CaptureFixture[str]) -> None:
    life = Life(1)
    life.has_all()
    life.wire.turns += [lambda: [(FIRST, m.FailoverNotice(2, "", True))]]
    assert life.loop() and not life.wire.watched
    assert f"serves in the place of {ORIGINAL}, from clock 0 on" in capfd.readouterr().out


def test_it_says_once_that_it_stands_by(stdin: int, capfd: pytest.CaptureFixture[str]) -> None:
    for index, said in ((0, 1), (1, 0)):
        life = Life(index)

        def arrives(life: Life = life) -> list[Any]:
            life.has_all()
            return []

        life.wire.turns += [list, arrives, list, life.silence(ELECTION_TIMEOUT_NS + 1)]
        with pytest.raises(ServerLostError):
            life.loop()
        assert capfd.readouterr().out.count("stands by for") == said


def test_the_end_of_the_connection_to_its_original_is_a_sign() -> None:
    life = Life()
    life.time.now_ns = LEASE_NS
    for peer, lost in ((FIRST, False), (WORKER, False), (ORIGINAL, True)):
        life.standby.heard_ns = LEASE_NS
        life.follower.cut(peer)
        assert life.standby.lost(LEASE_NS + REPLICATION_CUT_NS + 1) == lost


def test_it_gives_up_where_nobody_turns_to_it(stdin: int) -> None:
    life = Life()
    life.wire.turns += [life.silence(ELECTION_TIMEOUT_NS), life.silence(1)]
    with pytest.raises(ServerLostError, match="too few workers"):
        life.loop()
    assert not life.wire.turns


def test_it_waits_for_a_server_whose_run_is_over_until_that_is_gone(stdin: int) -> None:
    """That holds its last words back for us."""
    life = Life()
    life.has_all()
    life.follower.replay.stop = StopProcess()
    lost_ns = max(NS, int(STANDBY_LOST_LEASES * LEASE_NS))
    life.wire.turns += [life.silence(lost_ns), life.silence(1), life.silence(ELECTION_TIMEOUT_NS)]
    assert not life.loop() and len(life.wire.turns) == 1
    life = Life()
    life.has_all()
    life.wire.turns += [life.silence(lost_ns + 1), life.silence(ELECTION_TIMEOUT_NS)]
    with pytest.raises(ServerLostError):
        life.loop()


# Before there is a process.

TOLD = {"release": release(), "settings": {}, "ports": [1, 2], "hash_seed": "3", "secret": "x", "parent": "",
        "has_parent_key": False}  # fmt: skip
STARTING = m.ReplicationBegin(pack(TOLD | {"ports": [1, UNKNOWN]}))  # of a server that still starts its second shard


def test_what_a_server_tells_is_checked() -> None:
    assert bootstrap_client.checked(ORIGINAL, TOLD) == TOLD
    parts: tuple[Any, ...] = ([], {name: TOLD[name] for name in TOLD if name != "secret"})
    for told in parts:
        with pytest.raises(RemoteProtocolError, match="description of itself is incomplete"):
            bootstrap_client.checked(ORIGINAL, told)
    with pytest.raises(IncompatibleError, match="the server runs Python 2"):
        bootstrap_client.checked(ORIGINAL, TOLD | {"release": "Python 2"})


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("one_port", "follows", "address"), [
    ("", ("tcp://127.0.0.1:9", "tcp://127.0.0.1:10"), "tcp://127.0.0.3:4711"),
    ("tcp://127.0.0.3:80", ("tcp://127.0.0.1:9", "tcp://127.0.0.1:10"), "tcp://127.0.0.3:80"),
    ("tcp://0.0.0.0:80", ("tcp://127.0.0.1:9", "socks5://127.0.0.1:9/shard-1"), "tcp://127.0.0.1:80"),
    ("", ("tcp://127.0.0.1:9", "socks5://127.0.0.1:9/shard-1"), "tcp://127.0.0.3:4711"),
])  # fmt: skip
def test_all_shards_of_a_standby_tell_one_address(
    one_port: str, follows: tuple[str, str], address: str, index: int
) -> None:
    """Its own, or that of the one port before it: a member dials it there, and shard 0 compares what each shard tells."""
    settings, bound = Settings(shards=2).validated(), "127.0.0.1" if one_port else "127.0.0.3"
    config = ServerConfig(
        index, settings, f"tcp://{bound}:0", f"tcp://{bound}:4711" if index else "", 1, "", False,
        secret=SECRET, follows=follows[index], one_port=one_port,
    )  # fmt: skip
    number = 0 if one_port else 4712 if index else 4711
    runner = StandbyRunner(config, cast(Sockets, Wire()), number, AccessControl("", "", SECRET, "", follows[index]))
    assert (runner.standby.address, runner.standby.port) == (address, number)
    supervisor = ShardSupervisor(settings)
    supervisor.follow(follows[0], TOLD | {"ports": [9, 0 if "socks5" in follows[1] else 10]})
    assert supervisor.follows[1] == follows[1]


@pytest.mark.parametrize(("answers", "error", "text"), [
    ([m.Refuse(5, -1, 0, "no room")], IncompatibleError, "no room"),
    ([], UnreachableError, "no server answered"),
    ([STARTING], UnreachableError, "has not started all of its shards; try again"),
    ([HandshakeFailure.REFUSED], AuthenticationError, "the keys there are others"),
])  # fmt: skip
def test_who_is_not_told_says_why(
    answers: list[Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = not answers or answers == [STARTING]
    monkeypatch.setattr(bootstrap_client, "CONNECT_S", 0.05 if waits else 3.0)
    monkeypatch.setattr(bootstrap_client, "Sockets", lambda **how: Answering(answers, **how))
    began = time.monotonic()
    with pytest.raises(error, match=text):
        bootstrap_client.ask("--standby", ORIGINAL, "")
    assert time.monotonic() - began < 2.0, "an answer is waited for no longer than until it comes"


def test_who_asks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other messages are ignored, and a server that still starts its shards is asked again."""
    answers = [STARTING, m.ReplicationEntry(1, 0, 0, 1, b"", 0, b"", b""), m.ReplicationBegin(pack(TOLD))]
    monkeypatch.setattr(bootstrap_client, "Sockets", lambda **how: Answering(answers, **how))
    assert bootstrap_client.ask("--standby", ORIGINAL, "") == TOLD


class Answering(Wire):
    """Answers one after the other, or says why it is refused."""

    def __init__(self, answers: list[Any], curve: object, failed: Callable[[str, HandshakeFailure, str], None]) -> None:
        super().__init__()
        self.answers, self.failed = deque(answers), failed

    def receive(self, limit_ms: int) -> list[tuple[Peer, list[Buffer]]]:
        assert self.sent[-1] == (ORIGINAL, m.ReplicationFollow(-1, -1))
        if not self.answers:
            return []
        answer = self.answers.popleft()
        if isinstance(answer, HandshakeFailure):
            self.failed(ORIGINAL, answer, "")
            return []
        return [(ORIGINAL, encode(answer))]


def test_a_standby_frees_the_parts_that_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the machine and what is left of its bytes it holds one array more, and a part."""
    settings, size, part = Settings().validated(), 1 << 20, 1 << 16
    coordinator = Coordinator(settings, 7)
    server = Server(Shard(0, settings, 1, 5, (), ShardResources(coordinator=coordinator)), coordinator)
    arrays = [np.full(size // 4, value, np.float32) for value in range(8)]
    monkeypatch.setattr(server.shard, "parent_residual", arrays)
    packed, parts = frozen(server, assume_lent), MachineParts()
    tracemalloc.start()
    try:
        for low in range(0, len(packed), part):
            parts.append(packed[low : low + part])
        here = tracemalloc.get_traced_memory()[0]
        assert here >= parts.nbytes == len(packed)
        tracemalloc.reset_peak()
        found: Any = thaw(parts, assume_lent).shard.parent_residual
        assert tracemalloc.get_traced_memory()[1] < here + 2 * size
    finally:
        tracemalloc.stop()
    assert not parts.nbytes and all(map(np.array_equal, found, arrays))


def test_parts_are_read_as_a_file() -> None:
    parts = MachineParts()
    for part in (b"ab\nc", memoryview(b"defg"), b"", b"h\n"):
        parts.append(part)
    assert (parts.count, parts.nbytes) == (4, 10)
    assert (parts.readline(), parts.read(2), parts.read(0)) == (b"ab\n", b"cd", b"")
    room = bytearray(3)
    assert parts.readinto(room) == 3 and room == b"efg"
    assert parts.readinto(memoryview(room)[:1]) == 1 and parts.read() == b"\n" and parts.readline() == b""
