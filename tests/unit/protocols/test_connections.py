"""Strangers at a listening socket: how many are kept, how much they may say, and what the others notice of it."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import zmq
import zmq.utils.z85
from kit.hostile_connections import RESETS, frame, reset, shaken
from kit.one_port import DIRECTLY, RelayThread, dialled, one_port
from kit.processes import until

from narrows.protocols.addresses import behind, shard_name
from narrows.protocols.runtime.network import curve_auth, sockets
from narrows.protocols.runtime.network.connections import REFUSED_MAX, STRANGERS_MAX, Connections, most_strangers
from narrows.protocols.runtime.network.curve_auth import CurveKeys, new_pair
from narrows.protocols.runtime.network.sockets import Peer, Sockets
from narrows.ps.process.port_relay import PortRelay

MOST = 8
LIMIT_S = 30.0
TURN_S = 0.5  # of thousands of frames, on a machine that is busy


@pytest.fixture
def kept() -> Connections:
    connections = Connections()
    connections.most = MOST
    return connections


@pytest.fixture
def server(kept: Connections) -> Iterator[Sockets]:
    with closing(Sockets(connections=kept)) as made:
        yield made


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sockets]:
    monkeypatch.setitem(sockets.OPTIONS, zmq.LINGER, 0)
    with closing(Sockets()) as made:
        yield made


class Door:
    """A way to a server for members and strangers: its own port, or the one port before it."""

    def __init__(self, name: str) -> None:
        self.name, self.shard = name, 1 if name == "CONNECT" else DIRECTLY
        self.port = 0
        self.relay: RelayThread[PortRelay] | None = None

    def open(self, server: Sockets) -> str:
        """Have the server listen. Return the address that members dial."""
        self.port = server.listen("tcp://127.0.0.1:0")
        if self.name == "own port":
            return f"tcp://127.0.0.1:{self.port}"
        self.relay = one_port({shard_name(max(self.shard, 0)): self.port}, most=200)
        self.port = self.relay.port
        return behind(f"tcp://127.0.0.1:{self.port}", max(self.shard, 0))

    def dialled(self, handshake: bool = True) -> socket.socket:
        """A connection that has said hello to ZeroMQ, or nothing."""
        return shaken(self.port, self.shard) if handshake else dialled(self.port, self.shard)


@pytest.fixture(params=["own port", "one port", "CONNECT"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Attacks come by each way, and get what they get at a port of the shard's own."""
    made = Door(request.param)
    yield made
    if made.relay is not None:
        made.relay.close()


def ended(connection: socket.socket) -> bool:
    """The other end has hung up. Its messages are thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def heard(port: Sockets) -> list[tuple[Peer, list[bytes]]]:
    return [(peer, [bytes(each) for each in frames]) for peer, frames in port.receive(10)]


@pytest.mark.parametrize("handshake", [False, True])
def test_of_silent_connections_the_oldest_are_ended(
    handshake: bool, kept: Connections, server: Sockets, child: Sockets, door: Door
) -> None:
    """A member that is let in stays, and the next one gets in."""
    if not handshake and door.name == "one port":
        pytest.skip("the relay ends those that do not say where they lead: test_strangers_end_before_members")
    address = door.open(server)

    def said() -> bool:
        child.send(address, [b"x"])
        found = heard(server)
        for peer, _ in found:
            assert isinstance(peer, bytes)
            kept.let_in(peer)
        return bool(found) and len(kept.named) == 1 and not kept.strangers

    until(said, "the member to be let in", LIMIT_S)
    with ExitStack() as stack:
        silent = [stack.enter_context(door.dialled(handshake)) for _ in range(5 * MOST)]
        until(lambda: all(map(ended, silent[:-MOST])), "the oldest to be ended", LIMIT_S)
        assert not any(map(ended, silent[-MOST:]))
        assert len(kept.strangers) == MOST and sum(kept.ended.values()) == 4 * MOST
        child.send(address, [b"y"])
        until(lambda: [b"y"] in [frames for _, frames in heard(server)], "the member to be heard", LIMIT_S)


def test_what_a_stranger_may_send_has_an_end(kept: Connections, server: Sockets, door: Door) -> None:
    """A message that never ends would be kept as long as it gets."""
    kept.bytes_most = 1 << 16
    door.open(server)
    with door.dialled() as first, door.dialled() as second:
        second.sendall(frame(b"x"))
        first.setblocking(False)

        def said() -> bool:
            with suppress(BlockingIOError):
                first.send(frame(bytes(1000), more=True) * 100)
            return ended(first)

        until(said, "the end of it", LIMIT_S)
        assert not ended(second) and [frames for _, frames in heard(server)] == [[b"x"]]
    assert list(kept.ended) == ["too many bytes without an accepted message"]


def test_who_sends_nothing_but_nonsense_is_hung_up_on(kept: Connections, server: Sockets, door: Door) -> None:
    """Its messages that had come by then are not read."""
    door.open(server)
    count = 0
    with door.dialled() as other, door.dialled() as stranger:
        other.sendall(frame(b"good"))
        deadline = time.monotonic() + LIMIT_S
        while not ended(stranger):
            assert time.monotonic() < deadline
            stranger.setblocking(True)
            stranger.sendall(frame(b"bad") * REFUSED_MAX)
            for peer, frames in heard(server):
                assert isinstance(peer, bytes)
                if frames == [b"good"]:
                    kept.let_in(peer)
                else:
                    count += 1
                    kept.refused(peer)
        assert REFUSED_MAX <= count <= 2 * REFUSED_MAX and not ended(other)
    assert list(kept.ended) == ["too many messages that were refused"]


def test_a_message_of_very_many_frames_is_thrown_away(kept: Connections, server: Sockets, door: Door) -> None:
    door.open(server)
    found = list[list[bytes]]()
    with door.dialled() as stranger, door.dialled() as other:
        stranger.sendall(frame(b"", more=True) * 50_000 + frame(b""))

        def answered() -> bool:
            other.sendall(frame(b"x"))
            found.extend(frames for _, frames in heard(server))
            return [b"x"] in found and ended(stranger)

        until(answered, "the other to be heard", 2 * LIMIT_S)
    assert max(map(len, found)) == 1, "nobody hears of it"
    assert list(kept.ended) == ["messages of too many frames"]


def test_very_many_frames_take_turns_with_all_else(kept: Connections, server: Sockets, door: Door) -> None:
    """The clock, the commands and the other sockets. Who dials this one waits until the last of them."""
    door.open(server)
    turns = list[float]()

    def comes(wanted: bytes) -> bool:
        turned = time.monotonic()
        found = heard(server)
        turns.append(time.monotonic() - turned)
        for peer, _ in found:
            assert isinstance(peer, bytes)
            kept.let_in(peer)  # who is no stranger may send very many
        return [wanted] in [frames for _, frames in found]

    with door.dialled() as member, door.dialled() as other:
        member.sendall(frame(b"a member"))
        until(lambda: comes(b"a member"), "the member", LIMIT_S)
        member.sendall(frame(b"", more=True) * 500_000 + frame(b""))
        until(lambda: comes(b"") or kept.ended, "the first of them", LIMIT_S)
        other.sendall(frame(b"x"))
        until(lambda: comes(b"x"), "the other to be heard", 3 * LIMIT_S)
        assert ended(member)
    assert list(kept.ended) == ["messages of too many frames"] and max(turns) < TURN_S


def test_what_is_anothers_by_now_is_let_alone() -> None:
    """ZeroMQ has closed it meanwhile, and the system gives its number to the next."""
    connections = Connections()
    ours, theirs = socket.socketpair()
    other, far = socket.socketpair()
    with ours, theirs, other, far:
        connections.accept(ours.fileno())
        assert connections.said(b"name", ours.fileno())
        os.dup2(other.fileno(), ours.fileno())
        connections.end(b"name", "why")
        assert connections.ended == {"why": 1} and not ended(far)


def test_the_end_of_a_connection_is_that_of_its_owner_unless_that_has_another() -> None:
    connections = Connections()
    pairs = [socket.socketpair() for _ in range(3)]
    first, second, third = (ours.fileno() for ours, _ in pairs)
    for descriptor in (first, second, third):
        connections.accept(descriptor)
    assert connections.said(b"name", first) and connections.gone(first) == b"", "a stranger"
    connections.accept(first)
    for descriptor in (first, second):
        assert connections.said(b"name", descriptor)
        connections.let_in(b"name")
    assert connections.gone(first) == b"" and connections.gone(second) == b"name" and connections.gone(second) == b""
    assert connections.gone(third) == b"", "it has said nothing"
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_both_are_told_that_a_connection_has_ended_after_all_that_was_sent(kept: Connections, server: Sockets) -> None:
    """Who serves, that a peer is gone; who dialled, that the server is; and who was never connected, nothing."""
    told: list[object] = []
    server.cut = lambda peer: told.append(("gone", peer))
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"

    def hears() -> bool:
        for peer, frames in heard(server):
            assert isinstance(peer, bytes)
            kept.let_in(peer)
            told.append((frames[0], peer))
        return len(told) == 4

    child = Sockets(cut=told.append)
    for said in (b"a", b"b", b"c"):
        child.send(address, [said])
    child.send("tcp://127.0.0.1:1", [b"x"])
    until(lambda: heard(child) or hears() or len(told) == 3, "the messages", LIMIT_S)
    child.close()
    until(hears, "the end", LIMIT_S)
    peer = next(iter(told))[1]  # type: ignore[index]
    assert told == [(b"a", peer), (b"b", peer), (b"c", peer), ("gone", peer)]

    told.clear()
    with closing(Sockets(cut=told.append)) as child:
        with closing(Sockets()) as other:
            address = f"tcp://127.0.0.1:{other.listen('tcp://127.0.0.1:0')}"
            child.send(address, [b"x"])
            child.send("tcp://127.0.0.1:1", [b"x"])
            until(lambda: heard(other), "the message", LIMIT_S)
        until(lambda: heard(child) or told, "the end", LIMIT_S)
        assert told == [address]


@pytest.mark.parametrize("let_in", [False, True])
@pytest.mark.parametrize("open_still", [False, True])
def test_a_message_may_come_before_the_monitor_tells_of_its_connection(
    let_in: bool, open_still: bool, kept: Connections
) -> None:
    """Its end is told all the same, where it was let in. It is counted once, and no longer once it was let in."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = ours.fileno()
        assert kept.said(b"name", descriptor)
        if let_in:
            kept.let_in(b"name")
        if not open_still:
            ours.close()
        kept.accept(descriptor)
        assert len(kept.accepted) == 1
        assert len(kept.strangers) == (not let_in)
        assert kept.said(b"name", descriptor)
        assert kept.gone(descriptor) == (b"name" if let_in else b"")
    assert not kept.accepted
    assert not kept.strangers
    assert not kept.named


def test_a_descriptor_that_is_a_socket_no_more_or_another_one_has_no_old_name(kept: Connections) -> None:
    with open(os.devnull) as file:
        assert kept.said(b"name", file.fileno())
        assert not kept.named
    ours, theirs = socket.socketpair()
    descriptor = os.dup(ours.fileno())
    kept.accept(descriptor)
    kept.said(b"name", descriptor)
    os.dup2(theirs.fileno(), descriptor)
    kept.accept(descriptor)
    assert not kept.named
    kept.gone(descriptor)
    os.close(descriptor)
    kept.accept(descriptor)
    assert not kept.accepted
    ours.close()
    theirs.close()


def test_strangers_leave_descriptors_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((256, 32), (1 << 20, STRANGERS_MAX), (-1, STRANGERS_MAX)):
        monkeypatch.setattr("resource.getrlimit", lambda what, soft=soft: (soft, soft))
        assert most_strangers() == most


@pytest.mark.parametrize("kind", RESETS)
def test_connections_that_are_reset_behind_a_message_cost_nothing(
    kind: str, kept: Connections, server: Sockets, child: Sockets, door: Door
) -> None:
    """The connection has no descriptor any more when its message is read."""
    address, count, found = door.open(server), 20, list[list[bytes]]()
    for _ in range(count):
        reset(door.port, kind, door.shard)
    child.send(address, [b"of a member"])
    all_come = kind == "old" and door.name == "own port"  # a relay may hear of the reset before it has read the message

    def all_heard() -> bool:
        found.extend(frames for _, frames in heard(server))
        return [b"of a member"] in found and (not all_come or len(found) == count + 1)

    until(all_heard, "the member", LIMIT_S)
    assert all(frames in ([b"x"], [b"of a member"]) for frames in found)


# Each call of a library that is made while messages are read, and whether a server makes it only with keys.
CALLS: dict[str, tuple[object, str, bool]] = {
    "poll": (zmq.Poller, "poll", False),
    "receive a frame": (zmq.Socket, "recv", False),
    "receive an event": (zmq.Socket, "recv_multipart", False),
    "look for an event": (zmq.Socket, "poll", False),
    "an option of a socket": (zmq.Socket, "getsockopt", False),
    "the connection of a message": (zmq.Frame, "get", False),
    "an event of those who dial": (curve_auth, "EVENT", False),
    "an event of our own dialling": (curve_auth, "recv_monitor_message", False),
    "the state of a connection": (os, "fstat", False),
    "the key of a message": (zmq.utils.z85, "decode", True),
    "who has the key of a message": (zmq.Frame, "get", True),
}
DOOR = "Thread-"  # as pyzmq names the thread that lets connections in


@pytest.mark.parametrize("error", [zmq.ZMQError(zmq.EINVAL), OSError(9, "planted"), ValueError("planted")], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_an_error_at_any_call_of_a_library_costs_a_message_at_most(
    name: str, error: Exception, kept: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call raises, and then one of five, while a member repeats what it says until all of it is heard."""
    owner, attribute, keyed = CALLS[name]
    rng, calls, planted = random.Random(0), [0], [0]

    def raises(call: Callable[..., object]) -> Callable[..., object]:
        def made(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if not threading.current_thread().name.startswith(DOOR) and (calls[0] == 1 or rng.random() < 1 / 5):
                planted[0] += 1
                raise error
            return call(*args, **kwargs)

        return made

    class Planted:
        unpack = staticmethod(raises(curve_auth.EVENT.unpack))

    pair = new_pair()
    keys = CurveKeys(pair, lambda address: (pair, pair.public), lambda public: True) if keyed else None
    found, wanted = set[bytes](), [b"%d" % number for number in range(6)]
    with closing(Sockets(connections=kept, curve=keys)) as server, ExitStack() as stack:
        member = stack.enter_context(closing(Sockets(curve=keys)))
        address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
        original = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, Planted if attribute == "EVENT" else raises(original))

        def all_heard() -> bool:
            reset(int(address.rpartition(":")[2]), "old")
            for said in wanted:
                member.send(address, [said])
            list(member.receive(0))
            found.update(frames[0] for _ in wanted for _, frames in heard(server))
            return found.issuperset(wanted) and planted[0] > 0

        until(all_heard, "the member", LIMIT_S)
        monkeypatch.undo()


def test_an_error_at_the_door_refuses_one_connection_and_no_other(
    kept: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, asked = new_pair(), list[str]()

    def admits(public: str) -> bool:
        asked.append(public)
        if len(asked) == 1:
            raise OSError(5, "the list cannot be read")
        return True

    curve_ = CurveKeys(pair, lambda address: (pair, pair.public), admits)
    with closing(Sockets(connections=kept, curve=curve_)) as server, ExitStack() as stack:
        address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
        members = [stack.enter_context(closing(Sockets(curve=curve_))) for _ in range(2)]
        members[0].send(address, [b"x"])
        until(lambda: list(members[0].receive(10)) or asked, "the first to be asked about", LIMIT_S)
        members[1].send(address, [b"y"])
        until(lambda: [b"y"] in [frames for _, frames in heard(server)], "the second", LIMIT_S)


def test_an_error_that_does_not_end_is_raised_and_one_that_ends_is_not(
    server: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> object:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    def go_on() -> None:
        for _ in range(10_000):
            assert list(server.receive(0)) == []

    with monkeypatch.context() as patched:
        patched.setattr(zmq.Poller, "poll", fails)
        assert list(server.receive(0)) == []
        with pytest.raises(zmq.ZMQError, match="non-socket"):
            go_on()
