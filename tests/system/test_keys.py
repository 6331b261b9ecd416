"""A closed wire: with keys nobody joins, speaks or listens who is not on the list; whoever is refused learns it at once."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from kit.processes import LIMIT_S, SCRIPT, Server, Worker, finished, serving, started, trained_alone, until
from kit.scripts import distance, flat

from narrows.protocols import messages as m
from narrows.protocols.addresses import behind, by_proxy
from narrows.protocols.errors import AuthenticationError, UsageError
from narrows.protocols.runtime.network import key_files
from narrows.protocols.runtime.network.curve_auth import (
    NOBODY,
    STRANGE_S,
    HandshakeFailure,
    HandshakeMonitor,
    KeyPair,
    dials,
    listens,
    new_pair,
)
from narrows.protocols.runtime.network.key_files import LIST_S, AdmittedKeys, Identity
from narrows.protocols.runtime.network.socks_dialler import SocksDialler
from narrows.protocols.wire import decode, encode
from narrows.ps.process.access_control import AccessControl
from narrows.worker.runtime.member_link import tell_left

AT_ONCE_S = 3.0  # refused within a second; the rest is the start of a process on a busy machine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The key folder of a server that lets in `city`."""
    key_files.make(str(tmp_path / "K"))
    key_files.add(str(tmp_path / "K"), "city", "worker")
    return tmp_path / "K"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "time.sleep(0.01)")
    return str(path)


def key_of(folder: Path, name: str = "city") -> str:
    return str(folder / f"{name}.key")


# Files.


def test_what_is_handed_over_is_one_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    code, out, _ = finished("ps-serve", "keys", "init", "K", cwd=tmp_path)
    assert code == 0 and "ps-serve keys add NAME --keys K" in out
    code, out, _ = finished("ps-serve", "keys", "add", "leipzig", cwd=tmp_path, env={"NARROWS_KEYS": "K"})
    path = tmp_path / "K" / "leipzig.key"
    assert out == path.read_text()  # the output goes to a file here
    assert code == 0 and path.stat().st_mode & 0o777 == 0o600
    assert key_files.member_key(str(path), "--key").name == "leipzig"
    assert finished("ps-serve", "keys", "list", "--keys", "K", cwd=tmp_path)[1] == "leipzig\n"
    assert finished("ps-serve", "keys", "revoke", "leipzig", "--keys", "K", cwd=tmp_path)[0] == 0
    assert finished("ps-serve", "keys", "list", "--keys", "K", cwd=tmp_path)[1] == "nobody\n"


@pytest.mark.parametrize(("mode", "how", "taken"), [
    (0o640, "own", False),  # its owner can see to it
    (0o440, "own, read-only", True),  # fsGroup, where a container runs as root
    (0o440, "another's", True),  # fsGroup, where it does not
    (0o440, "another's, of another group", False),
    (0o444, "own, read-only", False),
    (0o460, "another's", False),
])  # fmt: skip
def test_a_secret_that_a_manager_has_mounted_for_our_group_is_taken(
    mode: int, how: str, taken: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, stats = Path(key_of(folder)).stat(), os.statvfs(folder)
    os.chmod(key_of(folder), mode)
    if "read-only" in how:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=stats.f_flag | os.ST_RDONLY))
    if "another's" in how:
        monkeypatch.setattr(os, "geteuid", lambda: found.st_uid + 1)
    if "another group" in how:
        monkeypatch.setattr(os, "getegid", lambda: found.st_gid + 1)
        monkeypatch.setattr(os, "getgroups", list)
    if taken:
        assert key_files.member_key(key_of(folder), "--key").role == "worker"
    else:
        with pytest.raises(UsageError, match=r"others can read this secret; chmod 600"):
            key_files.member_key(key_of(folder), "--key")
    os.chmod(key_of(folder), 0o600)


def test_bad_keys_are_named_with_the_way_out(folder: Path, tmp_path: Path, script: str) -> None:
    os.chmod(key_of(folder), 0o640)
    with pytest.raises(UsageError, match=r"others can read this secret; chmod 600"):
        key_files.member_key(key_of(folder), "--key")
    with pytest.raises(UsageError, match=r"server.key: this is the key of a server; give the file that"):
        key_files.member_key(str(folder / "server.key"), "--key")
    for bad in ("", "{}", "[]", '{"name": 1}', "nonsense", json.dumps({"name": "x", "role": "worker", "public": "0" * 64,
                "secret": "1" * 64, "server": "2" * 64})):  # fmt: skip
        path = tmp_path / "bad.key"
        path.write_text(bad)
        os.chmod(path, 0o600)
        with pytest.raises(UsageError, match="this is no key; ps-serve keys makes them"):
            key_files.member_key(str(path), "--key")
    with pytest.raises(UsageError, match="a name has letters"):
        key_files.add(str(folder), "../city", "worker")
    with pytest.raises(UsageError, match="city is on the list already"):
        key_files.add(str(folder), "city", "worker")
    with pytest.raises(UsageError, match=r"nobody2 is not on the list of .*: it has city"):
        key_files.revoke(str(folder), "nobody2")
    with pytest.raises(UsageError, match="there are no keys of a server; ps-serve keys init"):
        key_files.server_key(str(tmp_path))
    os.chmod(key_of(folder), 0o600)
    os.replace(key_of(folder), folder / "server.key")
    with pytest.raises(UsageError, match=r"server\.key is the key of a worker, and no server can have it"):
        key_files.server_key(str(folder))
    for words, text in (
        (("ps-serve", "--bind", "tcp://0.0.0.0:0"), "ps-serve keys init DIR makes keys for --keys DIR"),
        (("ps-serve", "--parent-key", "x"), "--parent-key: this key is for the parent; give --parent too"),
        (("ps-worker", "--key", "x", script), "--key: the embedded server is on this machine alone"),
        (("ps-worker", "--server", "tcp://127.0.0.1:1", "--key", "x", script), "--key x: No such file"),
    ):
        code, _, err = finished(*words)
        assert code == 2 and text in err, err


def test_a_file_that_is_not_the_revoked_key_stays(tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    for each in (folder, other):
        key_files.make(str(each))
        key_files.add(str(each), "leipzig", "worker")
    os.replace(other / "leipzig.key", folder / "leipzig.key")
    key_files.revoke(str(folder), "leipzig")
    assert (folder / "leipzig.key").exists() and not key_files.listed(str(folder))


def test_the_list_is_read_again_and_a_torn_file_lets_nobody_in(folder: Path) -> None:
    guard, public = AdmittedKeys(str(folder)), key_files.member_key(key_of(folder), "--key").public
    assert guard.who(public) == Identity("city", "worker") and guard.who("0" * 64) is None
    (folder / "members" / "torn.json").write_text('{"name": "torn", "role"')
    other = key_files.member_key(str(key_files.add(str(folder), "other", "cluster")), "--key").public
    until(lambda: guard.who(other), "the list to be read again")
    key_files.revoke(str(folder), "city")
    until(lambda: guard.who(public) is None, "the revoked key to be gone", 4 * LIST_S)
    assert guard.who(guard.own.public) == Identity("server", "server")


# Runs. Strangers come by each way, and get what they get at a shard's own port.

WAYS: list[tuple[str, ...]] = [(), ("--one-port", "--shards", "2")]


def plainly(host: str, port: int, shard: int = 0) -> str:
    """As `hosts.endpoint`, without Unix sockets."""
    return behind(f"tcp://{host}:{port}", shard)


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_who_is_on_the_list_trains_as_ever(sync: str, folder: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving("--sync", sync, "--shards", "2", "--keys", str(folder), "--record", str(record)) as server:
        worker = Worker(server.address, key_of(folder))
        worker.train(6)
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        said = server.command.out
    assert "refused" not in said
    rows = [row for row in map(json.loads, record.read_text().splitlines()) if row["event"] == "sent"]
    assert sorted((row["shard"], row["name"]) for row in rows) == [(0, "city"), (1, "city")]
    for row in rows:
        assert row["bytes"] > 6 * 4 * 40, "six gradients of half the model each"
        assert f"shard {row['shard']}: city sent {row['bytes'] / 1e6:.2f} MB" in said
    if sync == "bsp":
        assert distance(flat(worker.model), trained_alone(6)) < 1e-6
    assert np.isfinite(flat(worker.model)).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_key_takes_away_no_place_of_another_key(way: tuple[str, ...], folder: Path) -> None:
    """Nor does it where shard 0 is killed meanwhile: what was said under which key is done again."""
    for name in ("village", "town"):
        key_files.add(str(folder), name, "worker")
    city = key_files.member_key(key_of(folder), "--key")
    said = "ps-serve: a worker with the key of city failed before it joined: the run waits for 2\n"
    with serving("--workers", "3", "--keys", str(folder), *way) as server, ThreadPoolExecutor(1) as pool:
        for number in range(3):
            tell_left(server.address, f"of a worker that never came {number}", city)
        until(lambda: server.command.out.count(said) == 2, server.command)
        server.kill_shard(0)
        first = pool.submit(Worker, server.address, key_of(folder, "village"))
        until(lambda: server.command.out.count(" joined at clock ") == 1, server.command)
        assert not first.done()
        second = Worker(server.address, key_of(folder, "town"))
        together = first.result(LIMIT_S)
        assert (together.session.world_size, server.command.out.count(said)) == (3, 2), server.command
        for worker in (together, second):
            worker.session.link.close()


class Strangers:
    """Tries to join a run that goes on meanwhile."""

    def __init__(self, server: Server, script: str) -> None:
        self.server, self.script = server, script

    def refused(self, *flags: str) -> str:
        """Run a command of ours, which ends with 4 at once, and return its error."""
        words = ("ps-worker", "--server", self.server.address, *flags, self.script, "3")
        with started(*words) as command:
            until(lambda: "starting 1 worker" in command.err or command.process.poll() is not None, "its start")
            before = time.monotonic()
            assert command.wait(LIMIT_S) == 4, command
            assert time.monotonic() - before < AT_ONCE_S + 9, command
            return command.err


@pytest.mark.parametrize("way", WAYS)
def test_strangers_are_refused_at_once_and_the_run_is_undisturbed(
    way: tuple[str, ...], folder: Path, tmp_path: Path, script: str
) -> None:
    """No key, a key of nobody's list, a key for another server, and one that is revoked while it trains."""
    key_files.make(str(tmp_path / "other"))
    foreign = key_files.add(str(tmp_path / "other"), "city", "worker")
    unlisted = json.loads(Path(key_of(folder)).read_text()) | json.loads(foreign.read_text())
    unlisted["server"] = key_files.server_key(str(folder)).public
    path = tmp_path / "unlisted.key"
    path.write_text(json.dumps(unlisted))
    os.chmod(path, 0o600)
    gone = str(key_files.add(str(folder), "gone", "worker"))
    with serving("--sync", "async", "--keys", str(folder), "--lease", "2", *way) as server:
        worker = Worker(server.address, key_of(folder))
        worker.train(3)
        strangers = Strangers(server, script)
        assert "the server accepts keys only: give --key FILE" in strangers.refused()
        assert "the server does not accept the key of city" in strangers.refused("--key", str(path))
        assert "--key was made for another server" in strangers.refused("--key", str(foreign))
        other = Worker(server.address, gone)
        other.train(2)
        key_files.revoke(str(folder), "gone")
        with pytest.raises(AuthenticationError, match="taken off the list"):
            until(lambda: other.step(), "the key to be refused", AT_ONCE_S)
        other.session.link.close()
        worker.train(3)
        worker.engine.finish()
        until(lambda: server.command.process.poll() is not None, "the run to end")
        assert server.command.process.returncode == 0, server.command
        said = server.command.out
    for text in ("without the keys of this run", "that is not on the list", "the key of gone was taken off the list"):
        # As it happened, and how often at the end. Each shard refuses the revoked key.
        assert said.count(text) == 2 or (way and "gone" in text and said.count(text) == 4), said


def test_a_server_without_keys_is_not_trusted_with_one(folder: Path, script: str) -> None:
    with serving("--sync", "async") as server:
        words = ("ps-worker", "--server", server.address, "--key", key_of(folder), script, "3")
        code, _, err = finished(*words)
    assert code == 4 and "the server has no keys: leave --key out" in err


@contextmanager
def tapped(port: int) -> Iterator[tuple[int, list[bytes]]]:
    """A port that leads to `port`, and what the first who dialled it has sent."""
    sent: list[bytes] = []

    def carry(source: socket.socket, target: socket.socket, keep: bool) -> None:
        try:
            while piece := source.recv(1 << 16):
                if keep:
                    sent.append(piece)
                target.sendall(piece)
        except OSError:
            pass
        finally:
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        try:
            while True:
                near, _ = listener.accept()
                stack.enter_context(closing(near))
                far = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
                first = not threads
                for ends in ((near, far, first), (far, near, False)):
                    threads.append(threading.Thread(target=carry, args=ends, daemon=True))
                    threads[-1].start()
        except OSError:
            pass

    threads: list[threading.Thread] = []
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        stack.callback(accepting.join, LIMIT_S)
        stack.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes `accept`: what it has taken is closed after that
        yield listener.getsockname()[1], sent


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_cannot_be_read_and_a_recording_opens_nothing(
    way: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrows.worker.runtime.member_link.endpoint", plainly)
    with serving("--sync", "async", "--keys", str(folder), *way) as server, tapped(server.port) as (port, sent):
        worker = Worker(f"tcp://127.0.0.1:{port}", key_of(folder))
        worker.train(4)
        recorded = b"".join(sent)
        # A word of two letters is among so many random bytes by chance.
        words = [word for word in (b"NRWS", socket.gethostname().encode()) if len(word) > 3]
        assert len(recorded) > 500 and not any(word in recorded for word in words)
        with socket.create_connection(("127.0.0.1", server.port)) as again:
            again.settimeout(LIMIT_S)
            again.sendall(recorded)
            answered = 0
            while piece := again.recv(1 << 16):  # until the server hangs up
                answered += len(piece)
        assert answered < 1000, "greeting and WELCOME at most"
        worker.train(2)
        worker.engine.finish()
        until(lambda: server.command.process.poll() is not None, "the run to end")
        assert server.command.process.returncode == 0 and "refused" in server.command.out, server.command


@contextmanager
def dealer(
    address: str, own: KeyPair | None = None, there: str = ""
) -> Iterator[tuple[zmq.Socket[bytes], HandshakeMonitor]]:
    """A stranger's, with keys of its own choice, and how its handshakes fail."""
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as made:
        made.setsockopt(zmq.LINGER, 0)
        if own is not None:
            dials(made, own, there)
        with closing(HandshakeMonitor(made, address)) as failures, ExitStack() as stack:
            by = by_proxy(address)
            made.connect(stack.enter_context(closing(SocksDialler(*by))).endpoint if by else address)
            yield made, failures


def refuses(failures: HandshakeMonitor, why: HandshakeFailure) -> bool:
    return why in failures.take()


@pytest.mark.parametrize("way", WAYS)
def test_each_kind_of_stranger_is_refused_within_a_second_and_counted(
    way: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run ends as if they had not been there. The seconds that each took are printed."""
    monkeypatch.setattr("narrows.worker.runtime.member_link.endpoint", plainly)
    other, gone = (
        key_files.member_key(str(key_files.add(str(folder), name, "worker")), "--key") for name in ("second", "gone")
    )
    took: dict[str, float] = {}
    with ExitStack() as stack:
        server = stack.enter_context(serving("--sync", "ssp", "--keys", str(folder), *way))
        port, sent = stack.enter_context(tapped(server.port))

        def timed(kind: str, done: Callable[[], Any]) -> None:
            began = time.monotonic()
            until(done, f"{kind} to be refused", AT_ONCE_S)
            took[kind] = time.monotonic() - began
            worker.train(2)

        def says(text: str) -> Callable[[], bool]:
            return lambda: text in server.command.out

        worker = Worker(f"tcp://127.0.0.1:{port}", key_of(folder), rate=0.001)
        worker.train(2)
        address, there = f"tcp://127.0.0.1:{server.port}", other.server

        again = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        again.settimeout(AT_ONCE_S)
        again.sendall(b"".join(sent))
        timed("a recording played back", lambda: not again.recv(1 << 16))
        timed("which is said", says("a connection without the keys of this run was refused"))

        for kind, pair, why in (
            ("no key", None, HandshakeFailure.KEYLESS),
            ("a wrong key", new_pair(), HandshakeFailure.REFUSED),
        ):
            for shard in range(1 + bool(way)):
                with dealer(behind(address, shard), pair, there) as (_, failures):
                    timed(f"{kind}, at shard {shard}", partial(refuses, failures, why))
        timed("which is named", says("a key that is not on the list was refused"))

        member = worker.session.link.member
        forged = m.Heartbeat(member.worker, member.epoch, sent_ns=1, ended=True)
        liar, _ = stack.enter_context(dealer(address, other.pair, there))
        liar.send_multipart(encode(forged))
        timed("a worker that speaks as another", lambda: liar.poll(10))
        refusal = decode(liar.recv_multipart())
        assert isinstance(refusal, m.Refuse) and "whose number it has" in refusal.text

        revoked, _ = stack.enter_context(dealer(address, gone.pair, there))

        def refused() -> bool:
            revoked.send_multipart(encode(m.Leave("nobody", -1)))
            assert revoked.poll(int(LIMIT_S * 1000))
            return isinstance(decode(revoked.recv_multipart()), m.Refuse)

        assert not refused()
        key_files.revoke(str(folder), "gone")

        timed("a revoked key", refused)

        worker.close()
        assert server.command.wait() == 0, server.command
        said = server.command.out
    assert distance(flat(worker.model), trained_alone(worker.clock, 0.001)) < 1e-5
    counted = [line for line in said.splitlines() if " times: " in line]
    for text, times in (("without the keys of this run", 1 + bool(way)), ("is not on the list", 1 + bool(way)),
                        ("the key of gone was taken off", 1), (refusal.text, 1)):  # fmt: skip
        assert sum(text in line for line in counted) == times, said
    with capfd.disabled():
        print("", *(f"{kind}: {seconds:.2f} s" for kind, seconds in took.items()), sep="\n")


def test_a_worker_s_key_serves_nobody(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Who has one and stands in for the server hears nothing."""
    key_files.add(str(folder), "rogue", "worker")
    rogue = key_files.member_key(key_of(folder, "rogue"), "--key")
    with zmq.Context() as context, closing(context.socket(zmq.ROUTER)) as stands_in:
        stands_in.setsockopt(zmq.LINGER, 0)
        listens(stands_in, rogue.pair)
        port = stands_in.bind_to_random_port("tcp://127.0.0.1")
        began = time.monotonic()
        with pytest.raises(AuthenticationError, match="--key was made for another server"):
            Worker(f"tcp://127.0.0.1:{port}", key_of(folder))
        took_s = time.monotonic() - began
        assert STRANGE_S < took_s < STRANGE_S + AT_ONCE_S
        with capfd.disabled():
            print(f" the key of another server: {took_s:.2f} s")
        assert not stands_in.poll(0)


def test_a_peer_outside_the_roster_is_not_let_in(folder: Path) -> None:
    """Its key is on the server's list, and it knows the address."""
    stranger = key_files.member_key(str(key_files.add(str(folder), "second", "worker")), "--key")
    with serving("--sync", "gossip", "--keys", str(folder)) as server:
        worker = Worker(server.address, key_of(folder))
        worker.train(2)
        address, _, public = worker.session.link.member.address.rpartition("/")
        began = time.monotonic()
        with dealer(address, stranger.pair, public) as (_, failures):
            until(lambda: HandshakeFailure.REFUSED in failures.take(), "the key to be refused", AT_ONCE_S)
            print(f"a peer outside the roster: {time.monotonic() - began:.2f} s")
            until(lambda: worker.session.link.drops.counts["stranger"], "it to be counted", AT_ONCE_S)
        worker.train(2)
        worker.engine.finish()
        worker.close()
        assert server.command.wait() == 0, server.command


def clusters(tmp_path: Path, folder: Path) -> list[str]:
    """Folders of two clusters that a root lets in, each of which lets in `one`."""
    made = []
    for name in ("north", "south"):
        key_files.add(str(folder), name, "cluster")
        key_files.make(str(tmp_path / name))
        key_files.add(str(tmp_path / name), "one", "worker")
        made.append(str(tmp_path / name))
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["ssp", "gossip"])
def test_two_levels_with_keys_of_their_own(
    sync: str, way: tuple[str, ...], folder: Path, tmp_path: Path, script: str
) -> None:
    north, south = clusters(tmp_path, folder)
    with serving("--sync", sync, "--workers", "2", "--keys", str(folder), *way) as root, ExitStack() as stack:
        commands = []
        for name, own in (("north", north), ("south", south)):
            flags = ("--parent", root.address, "--parent-key", key_of(folder, name), "--keys", own)
            below = stack.enter_context(serving("--sync", "bsp", "--push", "update", *way, *flags))
            words = ("ps-worker", "--server", below.address, "--key", f"{own}/one.key", script, "12")
            commands.append(stack.enter_context(started(*words)))
        for command in commands:
            assert command.wait() == 0, f"{command} {root.command}"
        assert root.command.wait() == 0
        said = root.command.out
    if sync == "ssp":
        assert "north sent " in said and "south sent " in said
    assert "refused" not in said


def test_nothing_is_said_in_the_open_by_who_has_keys(folder: Path) -> None:
    """A peer that names no key hears least of all; only a server above that has none may be dialled so."""
    key_files.add(str(folder), "north", "cluster")
    own, cluster = key_files.server_key(str(folder)), key_files.member_key(key_of(folder, "north"), "--parent-key")
    plain, keyed = "tcp://10.0.0.1:5", f"tcp://10.0.0.1:5/{'a' * 64}"
    for given in ((str(folder), ""), (str(folder), key_of(folder, "north")), ("", key_of(folder, "north"))):
        gate = AccessControl(*given, "secret", "tcp://127.0.0.1:1")
        assert gate.curve is not None
        pair = own.pair if given[0] else cluster.pair
        assert gate.curve.dials(plain) == (pair, NOBODY) and gate.curve.dials(keyed) == (pair, "a" * 64)
        assert gate.curve.dials("tcp://127.0.0.1:1") == ((own.pair, own.public) if given[0] else None)
    assert AccessControl("", "", "secret", "").curve is None


@pytest.mark.parametrize("way", WAYS)
def test_a_cluster_needs_the_key_of_a_cluster(way: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """ps-serve looks at the file; a server that was tampered with looks at what it is told."""
    with serving("--sync", "ssp", "--keys", str(folder), *way) as root:
        words = ("ps-serve", "--bind", "tcp://127.0.0.1:0", "--parent", root.address, "--parent-key", key_of(folder))
        code, _, err = finished(*words)
        assert code == 2 and "this is the key of a worker; the owner of the parent makes one with --role cluster" in err
        disguised = json.loads(Path(key_of(folder)).read_text()) | {"role": "cluster"}
        path = tmp_path / "disguised.key"
        path.write_text(json.dumps(disguised))
        os.chmod(path, 0o600)
        code, _, err = finished(*words[:-1], str(path), "--checkpoint-dir", "none", *way)
        assert code == 4 and "the key of city is that of a worker: a cluster needs one with --role cluster" in err


def test_workers_that_gossip_know_each_other_by_their_keys(folder: Path, script: str) -> None:
    key_files.add(str(folder), "second", "worker")
    with serving("--sync", "gossip", "--workers", "2", "--keys", str(folder)) as server, ExitStack() as stack:
        commands = []
        for name in ("city", "second"):
            words = ("ps-worker", "--server", server.address, "--key", key_of(folder, name), script, "12")
            commands.append(stack.enter_context(started(*words)))
        for command in commands:
            assert command.wait() == 0, f"{command} {server.command}"
        assert server.command.wait() == 0
