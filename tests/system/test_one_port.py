"""ps-serve --one-port: shards, page and metrics behind one TCP port, with keys and without."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path

import pytest
from kit.processes import SCRIPT, Server, Worker, descendants, finished, serving, started, trained_alone, until
from kit.scripts import distance, flat

from narrows.protocols.errors import AuthenticationError
from narrows.protocols.runtime.network import curve_auth, key_files, socks_dialler
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.protocols.runtime.network.socks_dialler import asked

ALL = "0.0.0.0"


def relay_of(server: Server) -> int:
    """Return the pid of the process that serves the one port."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(server.pids[0])}
    return next((int(pid) for pid, name in names.items() if name == "ps-one-port"), 0)


def read(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("keyed", [False, True])
def test_a_run_through_one_port_ends_as_without_though_shards_and_the_port_die(keyed: bool, tmp_path: Path) -> None:
    key, security = "", ["--insecure"]
    if keyed:
        key_files.make(str(tmp_path / "K"))
        key, security = str(key_files.add(str(tmp_path / "K"), "city", "worker")), ["--keys", str(tmp_path / "K")]
    flags = ["--one-port", "--shards", "2", "--sync", "bsp", "--dashboard", f"{ALL}:0", "--metrics", f"{ALL}:0"]
    with serving(*flags, *security, host=ALL) as server:
        address = f"tcp://127.0.0.2:{server.port}"  # of this machine, and without its Unix sockets
        if keyed:
            with pytest.raises(AuthenticationError):
                Worker(address)
        worker = Worker(address, key)
        worker.train(3)
        assert worker.session.link.ways == ["TCP", "TCP"]
        assert worker.session.link._shards == [address, f"socks5{address[3:]}/shard-1"]
        server.kill_shard(1)
        worker.train(3)
        server.kill_shard(0)
        worker.train(3)
        old = relay_of(server)
        os.kill(old, 9)
        until(lambda: relay_of(server) not in (0, old), "another process at the port")
        worker.train(3)
        assert "bsp" in read(server, "/frame.json")
        assert "narrows_" in read(server, "/metrics")
        assert "anyone who reaches this address can read it" in server.command.out
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        assert "the process of the one port died and is started again" in server.command.err
    assert distance(flat(worker.model), trained_alone(12)) < 1e-6


def test_only_the_one_port_is_open_beyond_loopback() -> None:
    with serving("--one-port", "--shards", "2", "--insecure", host=ALL) as server:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = {row[9]: row[1] for row in rows if row[3] == "0A"}
        ours = set()
        for pid in descendants(server.pids[0]):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                name = os.readlink(fd) if fd.exists() or fd.is_symlink() else ""
                ours |= {listening[inode]} if (inode := name.removeprefix("socket:[")[:-1]) in listening else set()
        assert {where for where in ours if not where.startswith("0100007F")} == {f"00000000:{server.port:04X}"}
        for name in ("shard-2", "127.0.0.1", "localhost", "page"):  # by CONNECT nobody gets further
            with (
                socket.create_connection(("127.0.0.1", server.port)) as line,
                pytest.raises(ConnectionError, match="refuses"),
            ):
                asked(line, name)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_commands_meet_at_one_port_over_ipv6(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT % "")
    with serving("--one-port", "--shards", "2", host="[::1]") as server:
        assert server.address == f"tcp://[::1]:{server.port}"
        with started("ps-worker", "--server", server.address, "train.py", "5", cwd=tmp_path) as workers:
            assert workers.wait() == 0, workers
        assert server.command.wait() == 0, server.command


def test_workers_of_this_machine_share_memory_behind_one_port() -> None:
    with serving("--one-port", "--shards", "2") as server:
        worker = Worker(server.address)
        worker.train(5)
        assert worker.session.link.ways == ["shared memory"] * 2
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
    assert distance(flat(worker.model), trained_alone(5)) < 1e-6


@pytest.mark.parametrize("there", ["nobody", "who says nothing"])
def test_a_shard_that_cannot_be_reached_is_dialled_in_vain_and_no_more(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq's own SOCKS_PROXY aborts the process here."""
    monkeypatch.setattr(socks_dialler, "DIAL_S", 0.2)
    monkeypatch.setattr(curve_auth, "PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = f"socks5://127.0.0.1:{port.getsockname()[1]}/shard-1"
        if there == "nobody":
            port.close()
        dialling = Sockets()
        assert not dialling.send(address, [b"x"]).dropped
        for _ in range(3):
            assert not [*dialling.receive(100)]
        dialling.hang_up(address)
        dialling.close()


@pytest.mark.parametrize("more", [
    ("--standby", "tcp://127.0.0.1:1"), ("--replicas", "1"), ("--parent", "tcp://127.0.0.1:1"), ("--join", "tcp://127.0.0.1:1"),
])  # fmt: skip
def test_what_does_not_go_with_one_port_is_refused(more: tuple[str, str]) -> None:
    code, _, said = finished("ps-serve", "--one-port", *more, "--bind", "tcp://127.0.0.1:0", "--checkpoint-dir", "none")
    assert code == 2 and "--one-port" in said and "leave" in said and more[0] in said, said


def test_a_cluster_and_its_workers_train_though_the_server_above_has_one_port(tmp_path: Path) -> None:
    key_files.make(str(tmp_path / "K"))
    key = str(key_files.add(str(tmp_path / "K"), "city", "cluster"))
    above = ("--one-port", "--shards", "2", "--sync", "ssp", "--keys", str(tmp_path / "K"))
    with serving(*above, host=ALL) as root:
        flags = ("--shards", "2", "--sync", "bsp", "--parent", f"tcp://127.0.0.2:{root.port}", "--parent-key", key)
        with serving(*flags) as city:
            worker = Worker(city.address)
            worker.train(4)
            root.kill_shard(1)
            worker.train(4)
            worker.engine.finish()
            assert city.command.wait() == root.command.wait() == 0, (city.command, root.command)
    assert distance(flat(worker.model), trained_alone(8)) < 1e-6


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, said = finished("ps-serve", "--one-port", "--bind", bind, "--checkpoint-dir", "none")
    assert code == 2 and f"cannot listen on {bind}: Address already in use" in said
