"""Workers of gossip that meet through a relay: at the server's one port, or at a ps-serve relay.

Those of `needs_lab` stand each in a network of its own, from which it reaches the relay's host alone. In the others
workers of this process do not ask for each other in their own network.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.gossip_reference import TRAINS, ends
from kit.in_process import together
from kit.processes import Command, Worker, descendants, finished, serving, started, until
from kit.scripts import flat
from lab import netns
from lab.link import Way

from narrows.protocols.runtime.network import key_files, socks_dialler

needs_lab = pytest.mark.skipif(bool(netns.available()), reason=netns.available() or "available")
WAY = Way(100e6, 0.005)
PORT, RELAY_PORT = 5555, 5556
GOSSIP = ("--sync", "gossip", "--checkpoint-dir", "none")
SOON = ("--lease", "4")


@contextmanager
def at(host: netns.Host, *words: str, cwd: Path) -> Iterator[Command]:
    """A command on a host of the lab."""
    with ExitStack() as stack:
        with host.inside():
            command = stack.enter_context(started(*words, cwd=cwd))
        yield command


def ready(path: Path, command: Command) -> dict[str, Any]:
    until(path.exists, command)
    return dict(json.loads(path.read_text()))


def relays_of(command: Command) -> list[int]:
    """The pids of the processes of a ps-serve that relay."""
    found = []
    for pid in descendants(command.pid):
        if (
            "node_relay" in Path(f"/proc/{pid}/cmdline").read_text()
            or "one-port" in Path(f"/proc/{pid}/comm").read_text()
        ):
            found.append(int(pid))
    return found


def rows_of(record: Path) -> list[dict[str, Any]]:
    """The figures of all heartbeats in a record."""
    events = map(json.loads, record.read_text().splitlines())
    return [row for event in events if event["event"] == "summary" for row in event["rows"]]


def counted(record: Path) -> set[int]:
    """The ranks of which the relay has counted bytes, by a record that ps-serve may be writing."""
    whole = record.read_bytes().rpartition(b"\n")[0].splitlines() if record.exists() else []
    events = [event for event in map(json.loads, whole) if event["event"] == "summary"]
    return {row["path"][0] for event in events for row in event["rows"] if row["relay_bytes"] > 0}


class Islands:
    """Hosts that reach the hub alone, a ps-serve there, and workers on the hosts."""

    def __init__(self, count: int, folder: Path, keys: bool, alone: bool, *flags: str, wanted: int = 0) -> None:
        self.stack, self.folder = ExitStack(), folder
        lab = self.stack.enter_context(netns.apart([WAY] * count))
        *self.hosts, self.hub = lab.hosts
        self.key = ""
        (folder / "script.py").write_text(TRAINS)
        secured: tuple[str, ...] = ("--insecure",)
        if keys:
            key_files.make(str(folder / "K"))
            self.key = str(key_files.add(str(folder / "K"), "home", "worker"))
            secured = ("--keys", str(folder / "K"))
        self.relay: Command | None = None
        if alone:
            self.relay = relay = self.stack.enter_context(self.relaying())
            until(lambda: "relays at" in relay.out, relay)
        place = f"tcp://{self.hub.address}:{RELAY_PORT}"
        met = ("--relay-at", place, "--relay-key", "relay.key") if alone else ("--one-port",)
        words = ("ps-serve", "--bind", f"tcp://0.0.0.0:{PORT}", "--ready-file", "ready", "--record", "record.jsonl")
        self.server = self.stack.enter_context(
            at(self.hub, *words, *GOSSIP, "--workers", str(wanted or count), *secured, *met, *flags, cwd=folder)
        )
        ready(folder / "ready", self.server)

    def relaying(self) -> Any:
        words = ("ps-serve", "relay", "--bind", f"tcp://0.0.0.0:{RELAY_PORT}", "--key", "relay.key")
        return at(self.hub, *words, cwd=self.folder)

    def worker(self, host: netns.Host, *more: str, relayed: bool = True) -> Command:
        key = ("--key", self.key) if self.key else ()
        words = ("ps-worker", "--server", f"tcp://{self.hub.address}:{PORT}", *key, *more)
        words += ("--relay", "script.py") if relayed else ("script.py",)
        return self.stack.enter_context(at(host, *words, cwd=self.folder))

    def __enter__(self) -> Islands:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()


@needs_lab
@pytest.mark.parametrize(("keys", "alone"), [(True, False), (False, True)])
def test_workers_behind_nats_end_with_one_model_though_their_relay_dies(
    keys: bool, alone: bool, tmp_path: Path
) -> None:
    with Islands(3, tmp_path, keys, alone) as islands:
        (tmp_path / "script.py").write_text(TRAINS.replace("< 60", "< 400"))  # the relay tells a count each BEAT_S
        workers = [islands.worker(host) for host in islands.hosts]
        until(lambda: counted(tmp_path / "record.jsonl") == {0, 1, 2}, islands.server)
        if islands.relay is not None:
            os.kill(islands.relay.pid, signal.SIGKILL)
            islands.relay.process.wait()
            again = islands.stack.enter_context(islands.relaying())
        else:
            (relay,) = relays_of(islands.server)
            os.kill(relay, signal.SIGKILL)
        for each in workers:
            assert each.wait() == 0, f"{each}\n{islands.server}"
        assert len(ends("".join(each.out for each in workers))) == 1
        assert islands.server.wait() == 0, islands.server
        assert not any("lost" in each.err for each in workers), workers
        rows = rows_of(tmp_path / "record.jsonl")
        assert {row["relayed"] for row in rows} == {1}
        if alone:
            os.kill(again.pid, signal.SIGINT)
            assert again.wait() == 0
            said = re.findall(r"([\d.]+) MB went through the relay", again.out)
            assert said and float(said[-1]) > 0, again
        else:
            assert "the process of the one port died and is started again" in islands.server.out + islands.server.err
            assert "MB went through the relay" in islands.server.out, islands.server


@needs_lab
def test_workers_go_on_through_their_relay_when_the_server_is_killed(tmp_path: Path) -> None:
    with Islands(2, tmp_path, True, True) as islands:
        workers = [islands.worker(host, "--server-timeout", "3") for host in islands.hosts]
        until(lambda: all("trains" in each.out for each in workers), islands.server)
        for pid in [islands.server.pid, *descendants(islands.server.pid)]:
            os.kill(pid, signal.SIGKILL)
        for each in workers:
            assert each.wait() == 0, each
            assert "the server is lost; the workers go on without it" in each.err
        assert len(ends("".join(each.out for each in workers))) == 1


@needs_lab
def test_workers_whose_relay_and_server_are_gone_train_on_alone(tmp_path: Path) -> None:
    with Islands(2, tmp_path, False, False, "--lease", "2") as islands:
        workers = [islands.worker(host, "--server-timeout", "3") for host in islands.hosts]
        until(lambda: all("trains" in each.out for each in workers), islands.server)
        for pid in [islands.server.pid, *descendants(islands.server.pid)]:
            os.kill(pid, signal.SIGKILL)
        for each in workers:
            assert each.wait() == 0, each
            assert "the server is lost; the workers go on without it" in each.err
            assert "does not answer; this worker dials it again and again" in each.err
        assert all(len(ends(each.out)) == 1 for each in workers)


@needs_lab
def test_a_killed_worker_is_mixed_with_no_more_and_another_joins(tmp_path: Path) -> None:
    with Islands(4, tmp_path, True, False, *SOON, wanted=3) as islands:
        (tmp_path / "script.py").write_text(TRAINS.replace("< 60", "< 600"))  # another takes its time to begin
        first, second, third = [islands.worker(host) for host in islands.hosts[:3]]
        until(lambda: all("trains" in each.out for each in (first, second, third)), islands.server)
        for pid in [*descendants(third.pid), third.pid]:
            os.kill(pid, signal.SIGKILL)
        (shard,) = ready(tmp_path / "ready", islands.server)["shard_pids"]
        os.kill(shard, signal.SIGKILL)  # the next process of shard 0 gives tickets of the same relay
        until(lambda: ready(tmp_path / "ready", islands.server)["shard_pids"] != [shard], "another shard 0")
        late = islands.worker(islands.hosts[3])
        for each in (first, second, late):
            assert each.wait() == 0, f"{each}\n{islands.server}"
        assert len(ends("".join(each.out for each in (first, second, late)))) == 1, (first, second, late)
        assert islands.server.wait() == 0


@needs_lab
def test_workers_behind_one_nat_meet_without_the_relay(tmp_path: Path) -> None:
    with Islands(1, tmp_path, False, False, wanted=2) as islands:
        both = islands.worker(islands.hosts[0], "-n", "2")
        assert both.wait() == 0, f"{both}\n{islands.server}"
        assert len(ends(both.out)) == 1
        assert islands.server.wait() == 0
        rows = rows_of(tmp_path / "record.jsonl")
        assert {(row["relayed"], row["relay_bytes"]) for row in rows} == {(1, 0)}
        assert "went through the relay" not in islands.server.out


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process meet through the relay, and not in their own network."""
    monkeypatch.setenv("NARROWS_RELAY", "1")
    monkeypatch.setattr(socks_dialler, "NEAR_S", 0.0)


def trained(address: str, count: int, steps: int = 6) -> list[Worker]:
    workers = together(lambda index: Worker(address), count)
    together(lambda index: workers[index].train(steps), count)
    together(lambda index: workers[index].engine.finish(), count)
    return workers


@pytest.mark.usefixtures("relayed")
def test_two_workers_meet_at_the_one_port_of_their_server(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving("--sync", "gossip", "--workers", "2", "--one-port", "--record", str(record)) as server:
        workers = trained(server.address, 2)
        assert np.array_equal(flat(workers[0].model), flat(workers[1].model))
        together(lambda index: workers[index].close(), 2)
        assert server.command.wait() == 0, server.command
        assert "a worker that its peers cannot dial, as behind a NAT: give it --relay too" in server.command.out
        assert "MB went through the relay" in server.command.out
    last = [event for event in map(json.loads, record.read_text().splitlines()) if event["event"] == "relay"][-1]
    size = 4 * flat(workers[0].model).size
    assert last["bytes"] > 2 * 6 * size and last["text"].endswith("MB went through the relay")  # all of their offers


@needs_lab
def test_who_can_be_dialled_is_dialled_and_the_relay_is_for_the_others(tmp_path: Path) -> None:
    with Islands(2, tmp_path, True, False, wanted=3) as islands:
        first, second = (islands.worker(host) for host in islands.hosts)
        third = islands.worker(islands.hub, relayed=False)
        for each in (first, second, third):
            assert each.wait() == 0, f"{each}\n{islands.server}"
        assert len(ends(first.out + second.out + third.out)) == 1
        assert islands.server.wait() == 0
        newest = {tuple(row["path"]): row for row in rows_of(tmp_path / "record.jsonl")}
        assert sorted(row["relayed"] for row in newest.values()) == [0, 1, 1]
        assert all(row["relay_bytes"] == 0 for row in newest.values() if not row["relayed"])


# What does not go.


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[tuple[Command, str, str]]:
    """A ps-serve relay, its address, and the file of its secret."""
    key = tmp_path / "relay.key"
    with started("ps-serve", "relay", "--bind", "tcp://127.0.0.1:0", "--key", str(key)) as command:
        until(lambda: "it is a secret" in command.out, command)
        found = re.search(r"relays at (tcp://\S+);", command.out)
        assert found is not None
        yield command, found[1], str(key)


def failed(address: str, folder: Path, *flags: str) -> tuple[int, str]:
    """Run a worker that peers reach through the relay. Returns its exit code, and what it said."""
    (folder / "script.py").write_text(TRAINS)
    code, _, err = finished("ps-worker", "--server", address, "--relay", *flags, "script.py", cwd=folder)
    return code, err


@pytest.mark.usefixtures("relayed")
def test_a_relay_stands_alone_and_its_key_decides(relay: tuple[Command, str, str], tmp_path: Path) -> None:
    command, address, key = relay
    assert oct(Path(key).stat().st_mode)[-3:] == "600"
    met = ("--sync", "gossip", "--workers", "2", "--relay-at", address)
    with serving(*met, "--relay-key", key) as server:
        workers = trained(server.address, 2)
        assert np.array_equal(flat(workers[0].model), flat(workers[1].model))
        together(lambda index: workers[index].close(), 2)
        assert server.command.wait() == 0, server.command
    key_files.make_relay_key(other := str(tmp_path / "other.key"))
    with serving(*met, "--relay-key", other) as server:
        code, said = failed(server.address, tmp_path)
        assert code == 4 and f"{address}: the relay refuses this worker: its --key is not the --relay-key of" in said, (
            said
        )
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 0
    assert "MB went through the relay" in command.out
    with serving(*met, "--relay-key", key) as server:
        code, said = failed(server.address, tmp_path, "--connect-timeout", "5")
        assert code == 3 and f"{address}: no relay answers there (Connection refused): start ps-serve relay" in said, (
            said
        )


@pytest.mark.parametrize("flags", [("--sync", "gossip"), ("--sync", "ssp", "--one-port")])
def test_a_server_without_a_relay_is_named(flags: tuple[str, ...], tmp_path: Path) -> None:
    with serving(*flags, "--workers", "1") as server:
        code, said = failed(server.address, tmp_path)
        assert code == 5 and "names no relay: --sync gossip has one, with --one-port or with --relay-at" in said, said


@pytest.mark.parametrize(("words", "said"), [
    (("--relay-at", "tcp://127.0.0.1:1"), "--relay-at tcp://127.0.0.1:1: give --relay-key too"),
    (("--relay-key", "x"), "--relay-key x: give --relay-at too"),
    (("--relay-at", "there", "--relay-key", "x"), "--relay-at there: write it as tcp://HOST:PORT"),
    (("--relay-at", "tcp://127.0.0.1:1", "--relay-key", "missing"), "missing: No such file or directory; ps-serve relay --key"),
    (("--sync", "ssp", "--relay-at", "tcp://127.0.0.1:1"), "workers meet at a relay only under --sync gossip; leave it out"),
    (("relay", "--key", "text"), "--key text: this is no key of a relay"),
    (("relay", "--key", "open"), "--key open: others can read this secret; chmod 600 open"),
    (("relay", "--key", "no/such/folder"), "no/such/folder: No such file or directory"),
])  # fmt: skip
def test_flags_that_say_no_relay_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{}")
    (tmp_path / "text").chmod(0o600)
    (tmp_path / "open").write_text("{}")
    (tmp_path / "open").chmod(0o644)
    more: tuple[str, ...] = () if words[0] == "relay" else ("--bind", "tcp://127.0.0.1:0", "--checkpoint-dir", "none")
    more += () if "--sync" in words or words[0] == "relay" else ("--sync", "gossip")
    code, _, err = finished("ps-serve", *words, *more, cwd=tmp_path)
    assert code == 2 and said in err, err


def test_a_taken_port_of_a_relay_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = finished("ps-serve", "relay", "--bind", bind, "--key", "relay.key", cwd=tmp_path)
    assert code == 2 and f"cannot listen on {bind}: Address already in use" in err


@pytest.mark.parametrize(("words", "said"), [
    ((), "--relay: workers of this machine alone dial each other; leave it out, or give --server"),
    (("--server", "tcp://127.0.0.1:1", "--group"), "it has no --group; leave one of the two out"),
    (("--server", "tcp://127.0.0.1:1", "--sync", "ssp"), "--relay: workers meet only under --sync gossip, not ssp"),
])  # fmt: skip
def test_workers_that_cannot_have_a_relay_are_named(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    code, _, err = finished("ps-worker", "--relay", *words, "script.py", cwd=tmp_path)
    assert code == 2 and said in err, err
