"""A shard process that is killed goes on where it was: nobody joins again, and nothing is done twice or lost."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.fold_logs import Log, folded, settled, telling, whole_run, wrong
from kit.processes import LIMIT_S, SCRIPT, Server, Worker, descendants, parent, serving, started, trained_alone, until
from kit.scripts import distance, flat

from narrows.protocols.config.settings import Settings
from narrows.ps.command import shard_supervisor
from narrows.ps.command.shard_supervisor import ShardSupervisor
from narrows.ps.journal.journal import files

BELOW = ("--sync", "bsp", "--push", "update")  # a server that imports no torch
RATE = 0.001  # of hundreds of steps, which must not end in noise
# Half a lease. A kill mostly costs half a second, on a busy machine a second. Three or four of them may hit one step: the next
# comes as soon as a shard's successor has bound its port, and 2.0 and 2.8 s were seen in whole runs.
STALL_S = 5.0


class Killer(threading.Thread):
    """Kills these shards, one after the other, each at a moment of its own."""

    def __init__(self, server: Server, indices: tuple[int, ...], seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.indices, self.random = server, indices, random.Random(seed)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for index in self.indices:
                time.sleep(self.random.uniform(0.05, 0.4))  # whatever is under way then
                self.server.kill_shard(index)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.join()
        if self.error is not None:
            raise self.error


def undisturbed(server: Server, kills: int) -> None:
    """The run has ended well, and who trained has seen nothing of it."""
    assert server.command.wait() == 0, server.command
    said = server.command.out
    assert said.count("goes on where it was") == kills, server.command
    assert "goes back" not in said and "discarded" not in said and "lost" not in said, server.command
    assert "Traceback" not in server.command.err, server.command


@pytest.mark.parametrize(("flags", "exact"), [
    ("--sync bsp", True),
    ("--sync ssp", True),
    ("--sync ssp --staleness 0 --push gradient", True),
    ("--sync async", False),
    ("--sync ssp --compress topk:0.2+int8", False),
    ("--sync local --local-steps 4 --fragments 2 --merge-delay 1 --compress 2bit", False),
])  # fmt: skip
def test_nothing_is_lost_in_any_mode(flags: str, exact: bool, tmp_path: Path) -> None:
    with serving(*flags.split(), "--shards", "2", env=telling(tmp_path / "told")) as server:
        worker, longest = Worker(server.address, rate=RATE), 0.0
        log = Log(worker)
        worker.train(3)
        killer = Killer(server, (1, 0, 1, 0), seed=len(flags))
        while killer.is_alive():
            began, clock = time.monotonic(), worker.clock
            worker.step()
            longest = max(longest, time.monotonic() - began)
            assert worker.clock in (clock, clock + 1), "steps are not done again"
        killer.end()
        worker.train(10)
        worker.close()
        undisturbed(server, 4)
        assert server.command.out.count(" joined at clock ") == 1 and longest < STALL_S
    shards = folded(tmp_path / "told")
    assert [len(rows) for rows in shards] == [worker.clock] * 2 and len(log.settled) >= 2 * worker.clock - 4
    assert not wrong(shards, log.settled, log.weights)
    if exact:
        assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-5


@pytest.mark.parametrize(("planted", "found"), [("lost", "lacks .* which is acknowledged"), ("twice", "folds update")])
def test_the_logs_show_what_is_lost_or_folded_twice(planted: str, found: str, tmp_path: Path) -> None:
    """Bugs planted, in what a process does again."""
    told = tmp_path / "told"
    with serving("--sync", "ssp", "--shards", "2", env=telling(told, planted)) as server:
        worker = Worker(server.address, rate=RATE)
        log = Log(worker)
        worker.train(10)
        server.kill_shard(1)
        worker.train(10)
        worker.close()
    assert any(re.search(found, text) for text in wrong(folded(told), log.settled, log.weights))


def _acknowledged(folder: Path) -> bool:
    return len(settled(folder)) > 20


@pytest.mark.parametrize(("sync", "kills"), [("bsp", 2), ("ssp", 1)])
def test_what_a_killed_worker_was_acknowledged_is_in_the_model(sync: str, kills: int, tmp_path: Path) -> None:
    path, shards, theirs = tmp_path / "script.py", tmp_path / "shards", [tmp_path / f"kill{i}" for i in range(kills)]
    path.write_text(SCRIPT % "time.sleep(0.01)")
    flags = ("--sync", sync, "--workers", "2", "--shards", "2", "--lease", "2")
    with (
        serving(*flags, env=telling(shards)) as server,
        started("ps-worker", "--server", server.address, str(path), env=telling(tmp_path / "survivor")) as stays,
    ):
        for folder in theirs:
            with started("ps-worker", "--server", server.address, str(path), env=telling(folder)) as dies:
                until(partial(_acknowledged, folder), "updates that are acknowledged")
                for pid in (dies.pid, *descendants(dies.pid)):
                    os.kill(pid, signal.SIGKILL)
        stays.process.send_signal(signal.SIGINT)
        stays.wait()
    told = settled(tmp_path / "survivor", *theirs)
    assert len(told) > 40
    assert not wrong(folded(shards), told, {})


def test_two_levels_see_nothing_of_it(tmp_path: Path) -> None:
    told = {name: tmp_path / name for name in ("root", "first", "second")}
    begun, steps = threading.Event(), 200
    with (
        serving("--sync", "ssp", "--workers", "2", "--shards", "2", env=telling(told["root"])) as root,
        serving(*BELOW, "--shards", "2", "--parent", root.address, env=telling(told["first"])) as first,
        serving(*BELOW, "--shards", "2", "--parent", root.address, env=telling(told["second"])) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        logs = [pool.submit(whole_run, server.address, steps, begun) for server in (first, second)]
        assert begun.wait(LIMIT_S), f"{root.command}\n{first.command}\n{second.command}"
        for struck in (root, first):
            Killer(struck, (1, 0), 1).end()
        one, two = (log.result() for log in logs)
        for server in (first, second, root):
            undisturbed(server, 0 if server is second else 2)
            joined = server.command.out.count(" joined at clock ")
            assert joined == (2 if server is root else 1), server.command
    acknowledged = settled(told["first"], told["second"])
    assert len(acknowledged) > 2 * 190 * 2 and not wrong(folded(told["root"]), acknowledged, {})
    for name, log in (("first", one), ("second", two)):
        assert len(log.settled) > 2 * 190 and not wrong(folded(told[name]), log.settled, log.weights)


def test_clusters_that_gossip_go_on() -> None:
    begun = threading.Event()
    with (
        serving("--sync", "gossip", "--workers", "2") as root,
        serving(*BELOW, "--parent", root.address) as first,
        serving(*BELOW, "--parent", root.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        logs = [pool.submit(whole_run, server.address, 200, begun) for server in (first, second)]
        assert begun.wait(LIMIT_S), f"{root.command}\n{first.command}\n{second.command}"
        Killer(first, (0, 0), 1).end()
        Killer(root, (0,), 1).end()
        for log in logs:
            log.result()
        for server, kills in ((first, 2), (second, 0), (root, 1)):
            undisturbed(server, kills)


def test_one_that_had_no_more_to_say_is_found_again() -> None:
    """Its last report was seen, and under another connection it would have none to make."""
    with serving(*BELOW, "--shards", "2") as server:
        time.sleep(2.0)  # nothing happens
        server.kill_shard(1)
        began = time.monotonic()
        with Worker(server.address) as worker:
            worker.train(5)
        assert time.monotonic() - began < 20
        undisturbed(server, 1)


def test_the_server_of_gossip_too(tmp_path: Path) -> None:
    """Workers could go on without it; nobody could join."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "time.sleep(0.01)")
    with (
        serving("--sync", "gossip", "--shards", "2", "--workers", "3") as server,
        started("ps-worker", "-n", "3", "--server", server.address, str(path), "200") as workers,
    ):
        until(lambda: "clock " in workers.err or workers.process.poll() is not None, workers)
        Killer(server, (0, 1), 1).end()
        assert workers.wait() == 0, f"{workers}\n{server.command}"
        assert "3 of 3 workers done" in workers.err and "without" not in workers.err
        undisturbed(server, 2)


def test_all_at_once() -> None:
    with serving(*BELOW, "--shards", "6") as server:
        worker = Worker(server.address)
        worker.train(5)
        before = server.pids
        for pid in before[1:]:
            os.kill(pid, signal.SIGKILL)
        worker.train(20)
        worker.close()
        undisturbed(server, 6)
    assert distance(flat(worker.model), trained_alone(worker.clock)) < 1e-5


@pytest.mark.parametrize(("code", "serves", "keeps", "replays"), [
    (-9, True, True, True),
    (-9, True, False, False),
    (-9, False, True, False),
    (1, True, True, False),
])  # fmt: skip
def test_only_one_that_was_killed_goes_on(
    code: int, serves: bool, keeps: bool, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that failed, or was killed while it did all over again, would do so again."""
    told: list[Any] = []
    monkeypatch.setattr(shard_supervisor, "say", lambda *words, **more: None)
    ours = ShardSupervisor(Settings(shards=2).validated())
    ours.restart_policy.files[1], ours.shards[1] = files(), type("Ended", (), {"close_stdin": lambda self: None})()
    monkeypatch.setattr(ours, "start_shard", lambda index, replay: told.append((index, replay)))
    if serves:
        ours._taken((1, "bound", {"port": 1, "epoch": 0, "parent": ""}))
    if not keeps:
        ours._taken((1, "log", {"name": "journal", "values": {"text": "the memory is full"}}))
    ours._taken((1, "exit", code))
    assert told == [(1, replays)]
    for file in ours.restart_policy.files.get(1, ()):
        os.close(file)


def test_the_process_that_forks_them_too() -> None:
    """The shards go on as they are. One that is killed later is forked from another such process."""
    with serving(*BELOW, "--shards", "2") as server:
        worker = Worker(server.address)
        worker.train(5)
        before = server.pids
        (forker,) = {parent(pid) for pid in before[1:]} - {before[0]}
        os.kill(forker, signal.SIGKILL)
        until(lambda: {parent(pid) for pid in before[1:]} == {before[0]}, server.command)
        worker.train(10)
        assert server.pids == before and " died " not in server.command.err, server.command
        os.kill(before[1], signal.SIGKILL)
        until(lambda: server.pids[1] != before[1], server.command)
        worker.train(10)
        worker.close()
        undisturbed(server, 1)
    assert distance(flat(worker.model), trained_alone(worker.clock)) < 1e-5


def test_a_machine_whose_processes_are_gone_is_waited_for_a_quarter_of_a_lease(tmp_path: Path) -> None:
    """Nobody is left to say so, but its connections have ended."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "time.sleep(0.01)")
    with (
        serving(*BELOW, "--workers", "2", "--lease", "20") as server,
        started("ps-worker", "--server", server.address, str(path), "200") as one,
        started("ps-worker", "--server", server.address, str(path)) as two,
    ):
        until(lambda: "clock " in one.err, one)
        began = time.monotonic()
        pids = (two.pid, *descendants(two.pid))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none says a last word of the others
            for pid in pids:
                os.kill(pid, number)
        assert one.wait() == 0, f"{one}\n{server.command}"
        assert 5 < time.monotonic() - began < 19, "a quarter of the lease, and the steps"
        assert " expired at clock " in server.command.out and server.command.wait() == 0


def test_where_the_system_gives_no_memory_there_is_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def refused(*words: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(shard_supervisor, "say", lambda text, **more: said.append(text))
    monkeypatch.setattr("narrows.ps.journal.journal.os.memfd_create", refused)
    ours = ShardSupervisor(Settings(shards=2).validated())
    ours.ports[0] = 1
    monkeypatch.setattr(
        ours.children, "start", lambda *words, **more: type("Child", (), {"write": lambda self, line: None})()
    )
    for index in range(2):
        ours.start_shard(index)
    assert said == ["no journals are kept (Too many open files): a shard that dies goes back to a checkpoint"]
    assert not ours.restart_policy.files
