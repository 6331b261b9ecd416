"""narrows.worker.ray on a real Ray of several nodes on this machine, of which actors and a node are
killed: make test-ray."""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from kit.processes import alive, until
from safetensors.torch import load_file

# Else ray.init turns 127.0.0.1 into the machine's own address, where this cluster does not listen.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed here: make test-ray installs it in .venv-ray")

from narrows.protocols.errors import NarrowsError, UsageError  # noqa: E402
from narrows.worker.integrations import ray as runs  # noqa: E402
from narrows.worker.integrations import ray_actor  # noqa: E402
from narrows.worker.integrations.ray import Actors, KeptActor, Progress, train  # noqa: E402
from narrows.worker.integrations.ray_actor import CommandActor, NodeFacts  # noqa: E402
from narrows.worker.integrations.ray_cities import RayLimits  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]

SCRIPT = """
import sys, time, torch
from narrows.worker import DistributedOptimizer, record, step_count

def learn(steps=20, pause=0.0, evaluates=2.0):
    model = torch.nn.Linear(4, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    while step_count() < steps:
        time.sleep(pause)
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        record(loss=loss.item())
    optimizer.finish()
    time.sleep(evaluates)  # while the server has ended
    record(evaluated=7.0)

if __name__ == "__main__":
    learn(int(sys.argv[1]), *map(float, sys.argv[2:]))
"""


# Of two copies one trains, and the other loads its data for ever.
LATE = """    import os
    try:
        os.close(os.open(__file__ + ".first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        time.sleep(1000)
"""
HERE = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for workers."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"role": "server"}, **HERE})
    cluster.cities = {}
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Any:
    """Two cities with three places each, also after a test that removed one: the next one may ask for that."""
    for city in {"leipzig", "jena"} - {*cluster.cities}:
        cluster.cities[city] = cluster.add_node(num_cpus=3, labels={"city": city}, **HERE)
    return cluster


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_two_cities_train_a_function_and_nothing_is_left(
    nodes: Any, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    import script as module  # type: ignore[import-not-found]

    seen: list[Progress] = []
    result = train(
        module.learn, workers=1, clusters=[{"labels": {"city": "leipzig"}, "workers": (1, 2)}, {"labels": {"city": "jena"}}],
        labels={"role": "server"}, sync="ssp", quorum=None,
        compress="topk:0.5+sign", checkpoint_dir=str(tmp_path / "model"), host="127.0.0.1", report=seen.append, every_s=0.5,
        room_s=math.inf,
    )  # fmt: skip
    assert load_file(result.model)["weight"].shape == (2, 4) and result.clock == 20 and result.values["loss"] > 0
    assert result.values["evaluated"] == 7
    places = {facts.node for progress in seen for facts in progress.workers.values()}
    assert max(len(progress.workers) for progress in seen) == 3  # two in leipzig
    assert len(places) == 2 and max(len(progress.servers) for progress in seen) == 3
    pids = {
        facts.process for progress in seen for facts in (*progress.workers.values(), *progress.servers.values())
    } - {0}
    assert len(pids) >= 4
    until(lambda: not any(map(alive, pids)), "all commands to be gone")


def test_a_script_that_fails_is_named_with_its_last_lines(nodes: Any, script: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("raise ValueError('nothing is learned')\n")
    with pytest.raises(NarrowsError, match=r"worker 0 ended with exit code 1: .*nothing is learned"):
        train(str(tmp_path / "wrong.py"), workers=1, labels={"city": "jena"}, checkpoint_dir=str(tmp_path / "model"),
              host="127.0.0.1", report=None)  # fmt: skip
    with pytest.raises(NarrowsError, match=r"the server ended with exit code 2: .*stage 2, 'nothing'"):
        train(script, workers=1, compress="int8+nothing", checkpoint_dir=str(tmp_path / "other"), host="127.0.0.1",
              report=None)  # fmt: skip
    with pytest.raises(UsageError, match="quorum is one"):
        train(script, workers=1, qourum=2)


def test_only_what_dies_is_started_again(nodes: Any, script: str, tmp_path: Path) -> None:
    """In turn a worker's actor, the server's, and a node with a worker."""
    lives: dict[int, set[tuple[int, int]]] = {}
    server: list[int] = []
    struck: list[str] = []
    lost: list[int] = []

    def strike(progress: Progress) -> None:
        print(progress, struck, flush=True)
        for index, facts in progress.workers.items():
            if facts.process:
                lives.setdefault(index, set()).add((facts.pid, facts.process))
        server.extend(facts.pid for facts in progress.servers.values() if facts.pid not in server)
        if not struck and progress.clock >= 10 and len(lives) == 3:
            struck.append("actor")
            os.kill(progress.workers[1].pid, signal.SIGKILL)
        elif struck == ["actor"] and len(lives[1]) == 2:
            assert [len(lives[index]) for index in (0, 2)] == [1, 1]
            struck.append("server")
            os.kill(server[0], signal.SIGKILL)
        elif struck == ["actor", "server"] and len(server) == 2 and progress.workers and len(lives[0]) == 2:
            struck.append("node")
            ((city, far),) = [each for each in nodes.cities.items() if each[1].node_id == progress.workers[2].node]
            del nodes.cities[city]
            lost.extend(pid for index, facts in progress.workers.items() if facts.node == far.node_id
                        for pid in (facts.pid, facts.process))  # fmt: skip
            nodes.remove_node(far, allow_graceful=False)

    result = train(
        script, ["400", "0.05"], workers=(2, 3), labels=None, sync="ssp", checkpoint_dir=str(tmp_path / "model"),
        host="127.0.0.1", report=strike, every_s=0.5, checkpoint_every=1,
    )  # fmt: skip
    assert struck == ["actor", "server", "node"] and result.clock == 400 and Path(result.model).exists()
    until(lambda: not any(map(alive, lost)), "what was on that node to be gone")


def test_a_script_that_goes_on_after_the_run_is_ended_and_the_model_returned(
    nodes: Any, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Progress] = []
    result = train(
        script, ["5", "0", "1000"], workers=1, labels={"city": "jena"}, checkpoint_dir=str(tmp_path / "model"),
        host="127.0.0.1", report=seen.append, every_s=0.5, after_s=1.0,
    )  # fmt: skip
    assert load_file(result.model)["weight"].shape == (2, 4) and result.values["loss"] > 0
    assert result.clock >= 4  # a worker records a step once it begins the next one, or ends
    assert "narrows: worker 0 went on for 1 s after the server had ended." in capsys.readouterr().err
    pids = {facts.process for progress in seen for facts in progress.workers.values()} - {0}
    assert pids
    until(lambda: not any(map(alive, pids)), "the script to be gone")


def test_a_worker_that_comes_too_late_is_not_waited_for(
    nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It still loads its data when the server has ended."""
    path = tmp_path / "late.py"
    path.write_text(SCRIPT.replace("    learn(int", f"{LATE}    learn(int"))
    result = train(
        str(path), ["20", "0", "0"], workers=(1, 2), labels={"city": "jena"}, checkpoint_dir=str(tmp_path / "model"),
        host="127.0.0.1", report=None, every_s=0.5, after_s=40.0,
    )  # fmt: skip
    assert result.clock == 20 and "went on for" not in capsys.readouterr().err


def test_a_model_on_another_disk_is_copied(
    nodes: Any, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that leads elsewhere in an actor, as one on the disk of a node does. Here an earlier run has left a model."""
    there = Path.cwd() / tmp_path.name
    monkeypatch.chdir(tmp_path)
    here = tmp_path / there.name
    here.mkdir()
    (here / "model.safetensors").write_text("an earlier one")
    monkeypatch.setattr(runs, "PART_BYTES", 100, raising=False)
    try:
        result = train(
            script, ["20", "0", "0"], workers=1, labels={"city": "jena"}, checkpoint_dir=f"/proc/self/cwd/{there.name}",
            host="127.0.0.1", report=None, every_s=0.5,
        )  # fmt: skip
        assert (there / "model.safetensors").exists(), "it is another folder"
        assert load_file(result.model)["weight"].shape == (2, 4)
        assert {each.name for each in here.iterdir()} == {"model.safetensors", "model.safetensors.1"}
    finally:
        shutil.rmtree(there, ignore_errors=True)
    told = f"narrows: checkpoint_dir /proc/self/cwd/{there.name} is on another disk on node "
    assert capsys.readouterr().err.count(told) == 1


def test_a_folder_that_cannot_be_made_is_refused_at_once(script: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"^checkpoint_dir .*/file/run: Not a directory; name a folder on a disk that all"
    ):
        train(script, workers=1, checkpoint_dir=str(tmp_path / "file" / "run"), host="127.0.0.1", report=None)


def test_a_run_for_which_no_node_comes_is_ended_and_says_so(
    nodes: Any, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SILENT_S", 1.0)  # nobody waits for a server that has no node
    with pytest.raises(NarrowsError, match=r"^the server has had no node for 2 s: add a node with its labels and room"):
        train(script, workers=1, labels={"city": "gera"}, checkpoint_dir=str(tmp_path), host="127.0.0.1", report=None,
              every_s=0.2, room_s=2.0)  # fmt: skip


DRIVER = """
import os, sys, ray
from narrows.worker.ray import train

def report(progress):
    if progress.clock >= 5 and progress.servers:
        with open(sys.argv[4] + ".part", "w") as file:
            print(progress.servers[0].pid, progress.servers[0].process, file=file)
        os.replace(sys.argv[4] + ".part", sys.argv[4])

ray.init(address=sys.argv[1], log_to_driver=False)
train(sys.argv[2], ["10000", "0.05"], workers=1, labels={"city": "jena"}, checkpoint_dir=sys.argv[3], host="127.0.0.1",
      report=report, every_s=0.5, room_s=60.0)
"""


def test_a_server_ends_after_its_driver_with_a_checkpoint(nodes: Any, script: str, tmp_path: Path) -> None:
    model, pids, driver = tmp_path / "model", tmp_path / "pids", tmp_path / "driver.py"
    driver.write_text(DRIVER)
    with subprocess.Popen([sys.executable, driver, nodes.address, script, model, pids]) as process:
        try:
            until(pids.exists, "five steps", 240.0)
        finally:
            process.kill()
    server = [*map(int, pids.read_text().split())]
    assert len(server) == 2 and all(map(alive, server))
    until(lambda: not any(map(alive, server)), "the server to be gone", 180.0)
    assert [*model.glob("*.safetensors")]
    assert not [each for each in ray.util.list_named_actors(all_namespaces=True) if "narrows" in each["name"]]


def test_more_workers_than_a_server_has_threads_wait_for_its_address(nodes: Any, tmp_path: Path) -> None:
    words = ["serve", "--workers", "1", "--insecure"]
    server = runs._actor({}, {"CPU": 1}, words, "", None, "server", str(tmp_path), "127.0.0.1")
    try:
        waiters = [server.address.options(concurrency_group="address").remote() for _ in range(40)]
        ray.wait(waiters, timeout=1.0)
        server.run.remote()
        assert len({*ray.get(waiters, timeout=60)} - {""}) == 1
        ray.get(server.stop.remote(), timeout=60)
    finally:
        ray.kill(server)


# Without Ray.


@dataclass
class FakeActor:
    """Its methods return futures, which stand for Ray's references."""

    last: dict[str, float] | None  # it answers with that, or never
    stepped: dict[str, float] = field(default_factory=lambda: {"clock": 3})  # of its newest step
    ends: Future[tuple[int, str]] = field(default_factory=Future)

    def run(self) -> Future[tuple[int, str]]:
        return self.ends

    def without_server(self) -> None: ...

    def facts(self) -> Future[NodeFacts]:
        answer: Future[NodeFacts] = Future()
        if self.last is not None:
            answer.set_result(NodeFacts(1, 2, "node", 1, {**self.stepped, **self.last}))
        return answer


@dataclass
class Remote:
    """What a handle of Ray is: actor.method.remote()."""

    actor: FakeActor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


class FakeRay:
    exceptions = ray.exceptions

    @staticmethod
    def wait(references: list[Future[Any]], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        deadline = time.monotonic() + timeout
        while sum(each.done() for each in references) < num_returns and time.monotonic() < deadline:
            time.sleep(0.001)
        done = [each for each in references if each.done()]
        return done, [each for each in references if not each.done()]

    @staticmethod
    def get(reference: Future[Any]) -> Any:
        return reference.result(timeout=0)


Cities = tuple[Actors, FakeActor, list[FakeActor]]


@pytest.fixture
def cities(monkeypatch: pytest.MonkeyPatch) -> Cities:
    """Two cities with two workers each, of which one must not fail; the last one has no node."""
    monkeypatch.setattr(runs, "ray", FakeRay)
    for name in ("ANSWER_S", "LAST_S", "SILENT_S"):
        monkeypatch.setattr(runs, name, 0.02)
    server, fakes = FakeActor({}), [FakeActor({}), FakeActor({"loss": 1.0}), FakeActor({"loss": 3.0}), FakeActor(None)]
    actors = Actors([1, 1], [KeptActor("the server", Remote(server))])
    actors.workers = [KeptActor(f"worker {n}", Remote(fake), n // 2) for n, fake in enumerate(fakes)]
    return actors, server, fakes


def watched(actors: Actors, after_s: float) -> Progress:
    return runs._watch(actors, time.monotonic(), None, RayLimits(0.02, 60.0, after_s))


def test_the_number_of_a_worker_counts_over_all_cities(cities: Cities) -> None:
    actors, _, fakes = cities
    fakes[2].ends.set_result((1, "no data"))
    actors.check(time.monotonic(), 60.0)  # one is left in its city
    assert sorted(actors.progress(0.0, Progress(0.0, 0, {}, {}, {}), 0.02).workers) == [0, 1, 2]
    fakes[0].ends.set_result((1, "no data"))
    actors.check(time.monotonic(), 60.0)
    fakes[3].ends.set_result((7, "no disk"))
    with pytest.raises(NarrowsError, match=r"^worker 2 ended with exit code 1: no data$"):
        watched(actors, 60.0)


def test_a_worker_without_a_node_is_done_without_while_enough_are_left(cities: Cities) -> None:
    actors, _, fakes = cities
    actors.progress(0.0, Progress(0.0, 0, {}, {}, {}), 0.02)  # the last one does not answer
    late = time.monotonic() + 100
    actors.check(late, 60.0)
    fakes[2].ends.set_result((0, ""))
    actors.check(late, 60.0)  # its script is at its end
    actors.lows = [1, 2]
    actors.check(late, 200.0)
    with pytest.raises(NarrowsError, match=r"^worker 3 has had no node for 60 s: "):
        actors.check(late, 60.0)


def test_a_report_says_whom_the_run_waits_for() -> None:
    server = NodeFacts(1, 2, "node", 1, waits="2 of 3 workers joined; waiting for 1")
    waits = Progress(42.0, 0, {}, {0: server}, {}, 1)
    assert str(waits).endswith("0 workers  2 of 3 workers joined; waiting for 1; 1 worker has no node")
    assert Progress(42.0, 9, {}, {0: replace(server, waits="")}, {}, 1).waits == ""  # it has begun without


def test_scripts_are_waited_for_until_after_s(cities: Cities, capsys: pytest.CaptureFixture[str]) -> None:
    actors, server, fakes = cities
    fakes[1].ends.set_result((0, ""))
    server.ends.set_result((0, ""))
    last = watched(actors, 0.1)
    assert last.clock == 3 and last.values == {"loss": 2.0}  # also of what worker 0 does not record
    assert re.findall(r"worker \d", capsys.readouterr().err) == ["worker 0", "worker 2"]
    for number in (0, 2):
        fakes[number].ends.set_result((0, ""))
    began = time.monotonic()
    watched(actors, 60.0)  # nobody waits for the worker that has no node
    assert time.monotonic() - began < 30 and not capsys.readouterr().err


def test_what_a_script_records_at_its_end_counts(cities: Cities) -> None:
    """Also where an answer is under way that is older."""
    actors, server, fakes = cities
    actors.workers[0].asked = Future()
    actors.workers[0].asked_s = time.monotonic() + 3600
    fakes[0].last = {"evaluated": 7.0}
    for end in (server.ends, *(fake.ends for fake in fakes)):
        end.set_result((0, ""))
    assert watched(actors, 60.0).values == {"loss": 2.0, "evaluated": 7.0}


def test_a_worker_that_made_no_step_ends_no_run(cities: Cities) -> None:
    """It came while the others evaluate, and has recorded a value; or nobody has made a step, for the run has ended before."""
    actors, server, fakes = cities
    fakes[0].stepped, fakes[0].last = {}, {"accuracy": 1.0}
    shown = actors.progress(0.0, Progress(0.0, 0, {}, {}, {}), 0.02)
    assert shown.clock == 3 and shown.values == {"accuracy": 1.0, "loss": 2.0}
    for fake in fakes:
        fake.stepped, fake.last = {}, fakes[0].last
    for end in (server.ends, *(fake.ends for fake in fakes)):
        end.set_result((0, ""))
    last = watched(actors, 60.0)
    assert last.clock == 0 and last.values == {"accuracy": 1.0}


def test_a_folder_that_another_server_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "LOCK_S", 0.0)
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = CommandActor(["serve"], "--parent", None, "server", str(tmp_path), "127.0.0.1")
        code, said = server.run()
    assert code == 1 and said == f"{tmp_path} is another server's: name another checkpoint_dir"
    assert server.address() == ""  # nobody waits for it
