"""ps-serve --one-port: shards, page and metrics behind one TCP port, with keys and without."""

from __future__ import annotations

import os
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kit.processes import (
    SCRIPT,
    Server,
    Worker,
    descendants,
    finished,
    kill_relay,
    serving,
    started,
    trained_alone,
    until,
)
from kit.scripts import distance, flat

from narrows.protocols.errors import AuthenticationError
from narrows.protocols.runtime.network import curve_auth, key_files, socks_dialler
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.protocols.runtime.network.socks_dialler import asked

ALL = "0.0.0.0"


def listening(server: Server) -> set[str]:
    """Return the ports at which a server listens on other addresses than 127.0.0.1, four hex digits each."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    there = {row[9]: row[1] for row in rows if row[3] == "0A"}
    ours = set()
    for pid in descendants(server.pids[0]):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(fd) if fd.exists() or fd.is_symlink() else ""
            ours |= {there[inode]} if (inode := name.removeprefix("socket:[")[:-1]) in there else set()
    return {where.partition(":")[2] for where in ours if not where.startswith("0100007F")}


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
        kill_relay(server.pids[0])
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
        assert listening(server) == {f"{server.port:04X}"}
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


@pytest.mark.parametrize("whose", ["the server's", "the standby's"])
def test_the_port_of_a_server_or_its_standby_dies_and_nobody_turns(whose: str) -> None:
    """All connections of members and of the standby end at once. Then the server is lost, and the standby serves."""
    flags = ("--one-port", "--shards", "2", "--sync", "bsp", "--push", "update", "--replicas", "1")
    with (
        serving(*flags, host="127.0.0.2") as server,
        serving("--one-port", "--standby", server.address, host="127.0.0.2") as standby,
    ):
        worker = Worker(server.address, rate=0.001)
        worker.train(3)
        until(lambda: f"{standby.address} stands by: it has all" in server.command.out, server.command)
        struck = server if whose == "the server's" else standby
        for _ in range(3):
            kill_relay(struck.pids[0])
            worker.train(20)
        for each in (server, standby):
            said = each.command.out
            assert "serves in the place of" not in said and "is lost" not in said and "expired" not in said, said
        until(lambda: listening(standby) == {f"{standby.port:04X}"}, "the ports of the standby")
        server.kill()
        worker.train(20)
        assert worker.session.link._shards == [standby.address, f"socks5{standby.address[3:]}/shard-1"]
        worker.close()
        assert standby.command.wait() == 0 and "serves in the place of" in standby.command.out, standby.command
    assert distance(flat(worker.model), trained_alone(worker.clock, 0.001)) < 1e-5


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


def test_clusters_behind_one_port_each_gossip_with_each_other() -> None:
    """Each shard of one dials that shard of the other. All end with one model, of workers with rates of their own."""

    def trained(address: str, rate: float) -> npt.NDArray[np.float32]:
        worker = Worker(address, rate=rate)
        worker.train(12)
        worker.engine.finish()
        return flat(worker.model)

    one = ("--one-port", "--shards", "2")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        root = stack.enter_context(serving(*one, "--sync", "gossip", "--workers", "2", host="127.0.0.2"))
        below = (*one, "--sync", "bsp", "--push", "update", "--parent", root.address)
        cities = [stack.enter_context(serving(*below, host=f"127.0.0.{3 + number}")) for number in range(2)]
        for each in (root, *cities):
            assert listening(each) == {f"{each.port:04X}"}
        first, second = pool.map(trained, [city.address for city in cities], (0.01, 0.02))
        for each in (*cities, root):
            assert each.command.wait() == 0, each.command
    assert distance(first, second) < 1e-6
    assert min(distance(first, trained_alone(12, rate)) for rate in (0.01, 0.02)) > 1e-3


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, said = finished("ps-serve", "--one-port", "--bind", bind, "--checkpoint-dir", "none")
    assert code == 2 and f"cannot listen on {bind}: Address already in use" in said
