"""A server whose machine is lost: its standby serves in its place, and nobody joins again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.fold_logs import REST_S, Log, folded, settled, telling, wrong
from kit.processes import Server, Worker, finished, serving, small_model, started, trained_alone, until
from kit.scripts import distance, flat

from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow, packed
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.metrics import MemberMetrics

BELOW = ("--sync", "bsp", "--push", "update")  # a server that imports no torch
RATE = 0.001
STEPS_MAX = 2000
STALL_S = 11.0  # a lease, and a second
# Flags and host of the server and of its standby. 127.0.0.2 has no Unix sockets: workers dial as from another machine.
PORTS, ONE_PORT = ((), "127.0.0.1"), (("--one-port",), "127.0.0.2")
Way = tuple[tuple[str, ...], str]

# What a `Worker` trains, as a script of its own, until it finds the file `enough`.
TRAINS = f"""
import os, time, torch
from narrows.worker import DistributedOptimizer

model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr={RATE}, momentum=0.9), model)
while not os.path.exists("enough"):
    time.sleep({REST_S})
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
optimizer.finish()
"""


def stands_by(standby: Server, server: Server) -> None:
    until(lambda: f"{standby.address} stands by: it has all" in server.command.out, server.command)


def goes_on(worker: Worker, steps: int = 20) -> None:
    """No step takes longer than a lease, and none is done again."""
    for _ in range(steps):
        began, clock = time.monotonic(), worker.clock
        worker.step()
        assert worker.clock in (clock, clock + 1) and time.monotonic() - began < STALL_S


def ends_with(standby: Server, *workers: Worker, joined: int = 0) -> None:
    for worker in workers:
        worker.close()
    assert standby.command.wait() == 0, standby.command
    said = standby.command.out
    assert "serves in the place of" in said and "discarded" not in said, standby.command
    assert said.count(" joined at clock ") == joined, standby.command
    assert "Traceback" not in standby.command.err, standby.command


@pytest.mark.parametrize(("flags", "exact", "way", "second"), [
    ("--sync bsp", True, PORTS, PORTS),
    ("--sync ssp --staleness 0 --push gradient", True, PORTS, PORTS),
    ("--sync async --compress topk:0.2+int8", False, PORTS, PORTS),
    ("--sync local --local-steps 4 --fragments 2 --merge-delay 1 --compress 2bit", False, PORTS, PORTS),
    ("--sync local --local-steps 4 --quorum 1 --compress 2bit", False, PORTS, PORTS),
    ("--sync bsp", True, ONE_PORT, ONE_PORT),
    ("--sync bsp", True, ONE_PORT, PORTS),
    ("--sync ssp", False, PORTS, ONE_PORT),
])  # fmt: skip
def test_the_standby_goes_on_where_the_server_was(
    flags: str, exact: bool, way: Way, second: Way, tmp_path: Path
) -> None:
    more = (*flags.split(), "--shards", "2", "--replicas", "1")
    with (
        # Both: what was folded before the standby had a copy comes with it.
        serving(*more, *way[0], host=way[1], env=telling(tmp_path / "server")) as server,
        serving("--standby", server.address, *second[0], host=second[1], env=telling(tmp_path / "told")) as standby,
    ):
        worker = Worker(server.address, rate=RATE)
        log = Log(worker)
        worker.train(20)
        stands_by(standby, server)
        worker.train(20)
        server.kill()
        goes_on(worker)
        ends_with(standby, worker)
    shards = folded(tmp_path / "told")
    assert [len(rows) for rows in shards] == [worker.clock] * 2 and len(log.settled) >= 2 * worker.clock - 4
    assert not wrong(shards, log.settled, log.weights)
    if exact:
        assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-5


class Narrow(MemberMetrics):
    """Figures of a worker whose link would take 20 s for its update: another plan gains."""

    said = 0

    def packed(self, meter: LinkMeter, streams: int, now_ns: int) -> bytes:
        self.said += 1
        rate = next(small_model().parameters()).nbytes / 20
        figures = Summary(steps=self.said, compute_seconds=0.05 * self.said, rate_up=rate, rate_down=rate)
        return packed([SummaryRow((), "", "", figures)])


@pytest.mark.parametrize("said", ["the run changes to it", "plan 2 from clock"])
def test_the_standby_goes_on_with_a_plan_that_changes(said: str, tmp_path: Path) -> None:
    """The server is lost once members are told to hold, of whom one has a clock to give yet; and once the plan is in force."""
    flags = ("--replan", "change", "--replan-after", "1", "--lease", "3", "--shards", "2", "--replicas", "1")
    with (
        serving(*BELOW, *flags, env=telling(tmp_path / "server")) as server,
        serving("--standby", server.address, env=telling(tmp_path / "told")) as standby,
    ):
        worker = Worker(server.address, rate=RATE)
        log = Log(worker)
        stands_by(standby, server)
        log.member.figures = Narrow()
        while said not in server.command.out and worker.clock < STEPS_MAX:
            worker.step()
            time.sleep(REST_S)
        server.kill()
        while worker.engine.settings.sync == "bsp" and worker.clock < STEPS_MAX:
            worker.step()
            time.sleep(REST_S)
        goes_on(worker)
        ends_with(standby, worker)
    shards = folded(tmp_path / "told")
    assert [len(rows) for rows in shards] == [worker.clock] * 2 and len(log.settled) >= 2 * worker.clock - 8
    assert not wrong(shards, log.settled, log.weights)


@pytest.mark.parametrize("way", [PORTS, ONE_PORT])
def test_a_standby_that_is_lost_is_done_without_and_another_takes_its_place(way: Way) -> None:
    flags = ("--sync", "ssp", "--shards", "2", "--replicas", "1", "--compress", "topk:0.2+int8")
    more, host = way
    with (
        serving(*flags, *more, host=host) as server,
        serving("--standby", server.address, *more, host=host) as standby,
    ):
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        stands_by(standby, server)
        Worker(f"{standby.address},{server.address}", rate=RATE).leave()  # a standby lets nobody in
        server.kill_shard(1)  # which goes on by its journal, and its copy with it
        goes_on(worker, 5)
        standby.kill()
        goes_on(worker, 5)
        until(lambda: "goes on without one" in server.command.out, server.command)
        with serving("--standby", server.address, *more, host=host) as second:
            stands_by(second, server)
            goes_on(worker)
            os.kill(server.pids[0], signal.SIGKILL)  # ps-serve alone: its shards must end without a word
            goes_on(worker)
            late = Worker(f"{server.address},{second.address}", rate=RATE)  # the first is gone, the second serves
            late.leave()
            ends_with(second, worker, joined=1)


def test_a_worker_that_joins_while_the_server_is_lost_is_let_in_by_the_standby() -> None:
    flags = (*BELOW, "--shards", "2", "--replicas", "1")
    with serving(*flags) as server, serving("--standby", server.address) as standby:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        stands_by(standby, server)
        os.kill(server.pids[2], signal.SIGSTOP)  # so nobody who declares gets an answer
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(Worker, server.address, rate=RATE)
            until(lambda: "worker 1" in server.command.out, server.command)
            server.kill()
            joining.result(30).leave()
        ends_with(standby, worker)


@pytest.mark.parametrize("way", [PORTS, ONE_PORT])
def test_a_server_that_comes_back_is_served_no_more(way: Way, tmp_path: Path) -> None:
    assert finished("ps-serve", "keys", "init", str(tmp_path / "keys"))[0] == 0
    code, _, err = finished("ps-serve", "keys", "add", "one", "--keys", str(tmp_path / "keys"))
    assert code == 0, err
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")
    more, host = way
    flags = (*BELOW, "--shards", "2", "--replicas", "1", "--keys", str(tmp_path / "keys"), *more)
    with serving(*flags, host=host) as server:
        code, _, err = finished("ps-serve", "--bind", "tcp://127.0.0.1:0", "--standby", server.address)
        assert code == 4 and "give --keys" in err, err
        with serving("--standby", server.address, "--keys", str(tmp_path / "copy"), *more, host=host) as standby:
            worker = Worker(server.address, str(tmp_path / "keys" / "one.key"), RATE)
            worker.train(5)
            stands_by(standby, server)
            for pid in server.pids:
                os.kill(pid, signal.SIGSTOP)
            goes_on(worker)
            for pid in server.pids:
                os.kill(pid, signal.SIGCONT)
            assert server.command.wait() == 6, server.command
            assert "serves now" in server.command.err, server.command
            goes_on(worker, 5)
            ends_with(standby, worker)


def kept_its_place(root: Server) -> None:
    """The server above has ended, and its one cluster has joined once and left."""
    assert root.command.wait() == 0, root.command
    said = root.command.out
    assert said.count(" joined at clock ") == 1 and "expired" not in said and "discarded" not in said, root.command
    assert "Traceback" not in root.command.err, root.command


@pytest.mark.parametrize("way", [PORTS, ONE_PORT])
def test_a_cluster_turns_to_the_standby_of_the_server_above(way: Way, tmp_path: Path) -> None:
    told = {name: tmp_path / name for name in ("root", "standby", "cluster")}
    more, host = way
    flags = ("--sync", "bsp", "--push", "update", "--shards", "2", "--replicas", "1", *more)
    below = (*BELOW, "--shards", "2", *more)
    with (
        serving(*flags, host=host, env=telling(told["root"])) as root,
        serving("--standby", root.address, *more, host=host, env=telling(told["standby"])) as standby,
        serving(*below, "--parent", root.address, host=host, env=telling(told["cluster"])) as cluster,
    ):
        worker = Worker(cluster.address, rate=RATE)
        worker.train(20)
        stands_by(standby, root)
        worker.train(20)
        root.kill()
        goes_on(worker)
        ends_with(standby, worker)
        assert cluster.command.wait() == 0, cluster.command
        said = cluster.command.out
        assert f"the parent's standby at {standby.address} serves now" in said and said.count(" joined at clock ") == 1
    acknowledged = settled(told["cluster"])
    assert len(acknowledged) >= 2 * (worker.clock - 2) and not wrong(folded(told["standby"]), acknowledged, {})
    assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-4


@pytest.mark.parametrize("way", [PORTS, ONE_PORT])
def test_the_standby_of_a_cluster_has_its_place_in_the_run_above(way: Way, tmp_path: Path) -> None:
    above, here, copy = (str(tmp_path / name) for name in ("above", "here", "copy"))
    assert finished("ps-serve", "keys", "init", above)[0] == finished("ps-serve", "keys", "init", here)[0] == 0
    _, city, err = finished("ps-serve", "keys", "add", "city", "--keys", above, "--role", "cluster")
    assert city, err
    _, one, err = finished("ps-serve", "keys", "add", "one", "--keys", here)
    assert one, err
    shutil.copytree(here, copy)
    told = {name: tmp_path / f"told-{name}" for name in ("root", "cluster", "standby")}
    upward = ("--parent-key", str(Path(above) / "city.key"))
    more, host = way
    flags = (*BELOW, "--shards", "2", "--replicas", "1", "--keys", here, *upward, *more)
    with (
        serving("--sync", "ssp", "--shards", "2", "--keys", above, *more, host=host, env=telling(told["root"])) as root,
        serving(*flags, "--parent", root.address, host=host, env=telling(told["cluster"])) as cluster,
    ):
        follows = ("--standby", cluster.address, "--keys", copy)
        code, _, err = finished("ps-serve", "--bind", "tcp://127.0.0.1:0", *follows)
        assert code == 2 and "give --parent-key" in err, err
        with serving(*follows, *upward, *more, host=host, env=telling(told["standby"])) as standby:
            worker = Worker(cluster.address, str(Path(here) / "one.key"), RATE)
            worker.train(20)
            stands_by(standby, cluster)
            worker.train(20)
            cluster.kill()
            goes_on(worker)
            ends_with(standby, worker)
            kept_its_place(root)
    acknowledged = settled(told["standby"])
    assert len(acknowledged) >= 2 * (worker.clock - 2) and not wrong(folded(told["root"]), acknowledged, {})


@pytest.mark.parametrize("said", ["the run changes to it", "plan 2 from clock"])
def test_clusters_go_on_with_a_plan_that_changes_at_the_standby_of_the_root(said: str, tmp_path: Path) -> None:
    """The root is lost as it tells its clusters to hold; and once the plan is in force. One cluster has a ps-worker."""
    names = ("root", "standby", "city-0", "city-1", "worker")
    told = {name: telling(tmp_path / name) for name in names}
    flags = ("--replan", "change", "--replan-after", "1", "--lease", "3", "--workers", "2", "--replicas", "1")
    script, rate = tmp_path / "script.py", next(small_model().parameters()).nbytes / 20
    script.write_text(TRAINS)
    with ExitStack() as stack:

        def serve(name: str, *more: str) -> Server:
            return stack.enter_context(serving(*more, "--shards", "2", env=told[name]))

        root = serve("root", *BELOW, *flags)
        standby = stack.enter_context(serving("--standby", root.address, env=told["standby"]))
        cities = [serve(f"city-{number}", *BELOW, "--parent", root.address, "--lease", "3") for number in range(2)]
        words = ("ps-worker", "--server", cities[1].address, str(script))
        other = stack.enter_context(started(*words, env=told["worker"], cwd=tmp_path))
        worker = Worker(cities[0].address, rate=RATE)
        log = Log(worker)
        worker.step()
        stands_by(standby, root)
        log.member.figures = Narrow()  # whose steps take time; what joins it and its cluster is not compared
        for number in range(2):
            (tmp_path / f"city-{number}" / "narrow").write_text(str(rate))
        while said not in root.command.out and worker.clock < STEPS_MAX:
            worker.step()
            time.sleep(REST_S)
        root.kill()
        both = (root.command, standby.command)
        while not any("plan 2 from clock" in each.out for each in both) and worker.clock < STEPS_MAX:
            worker.step()
            time.sleep(REST_S)
        goes_on(worker)
        (tmp_path / "enough").touch()
        ends_with(standby, worker)
        assert other.wait() == 0, other
        for city in cities:
            assert city.command.wait() == 0, city.command
            assert f"the parent's standby at {standby.address} serves now" in city.command.out, city.command
            assert city.command.out.count(" joined at clock ") == 1, city.command
        for each in both:
            assert each.out.count("plan 2 from clock") <= 1 and "plan 3" not in each.out, each
    above, acknowledged = folded(tmp_path / "standby"), settled(tmp_path / "city-0", tmp_path / "city-1")
    assert len(acknowledged) >= 2 * 2 * (worker.clock - 8) and not wrong(above, acknowledged, {})
    for rows in above:
        for number in range(2):
            clocks = [update[2] for update, _ in rows if update[0] == number]
            assert clocks == [*range(len(clocks))] and len(clocks) >= worker.clock - 1
    for number, below in enumerate((log.settled, settled(tmp_path / "worker"))):
        assert len(below) >= 2 * (worker.clock - 8) and not wrong(folded(tmp_path / f"city-{number}"), below, {})


def test_a_cluster_that_was_taken_over_turns_too() -> None:
    flags = (*BELOW, "--shards", "1", "--replicas", "1")
    with (
        serving(*flags) as root,
        serving("--standby", root.address) as above,
        serving(*flags, "--parent", root.address) as cluster,
        serving("--standby", cluster.address) as standby,
    ):
        worker = Worker(cluster.address, rate=RATE)
        worker.train(5)
        stands_by(above, root)
        stands_by(standby, cluster)
        for pid in cluster.pids:
            os.kill(pid, signal.SIGSTOP)
        goes_on(worker, 5)
        root.kill()
        for pid in cluster.pids:  # it comes back, and does no harm above
            os.kill(pid, signal.SIGCONT)
        goes_on(worker)
        assert cluster.command.wait() == 6, cluster.command
        ends_with(standby, worker)
        ends_with(above)
    assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-4


def test_who_can_have_no_standby_is_told_why() -> None:
    code, _, err = finished("ps-serve", "--replicas", "1", "--sync", "gossip")
    assert code == 2 and "leave it out" in err, err


@pytest.mark.parametrize(("flags", "code", "sentence"), [
    ((), 5, "start it with --replicas 1"),
    (("--sync", "bsp"), 2, "leave out --sync"),
])  # fmt: skip
def test_who_cannot_stand_by_is_told_why(flags: tuple[str, ...], code: int, sentence: str) -> None:
    with serving(*BELOW) as server:
        ended, _, err = finished("ps-serve", "--bind", "tcp://127.0.0.1:0", "--standby", server.address, *flags)
        assert ended == code and sentence in err, err
