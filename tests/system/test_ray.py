"""narrows.worker.ray on a real Ray of several nodes on this machine, of which actors and a node are killed: make test-ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.processes import alive, until
from safetensors.torch import load_file

# Else ray.init turns 127.0.0.1 into the machine's own address, where this cluster does not listen.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed here: make test-ray installs it in .venv-ray")

from narrows.protocols.errors import NarrowsError, UsageError  # noqa: E402
from narrows.worker.ray import Progress, command_of, train  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]

SCRIPT = """
import sys, time, torch
from narrows.worker import DistributedOptimizer, record, step_count

def learn(steps=20, pause=0.0):
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
    time.sleep(2)  # it evaluates, while the server has ended
    record(evaluated=7.0)

def fails():
    raise ValueError("nothing is learned")

if __name__ == "__main__":
    learn(int(sys.argv[1]), float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without room for workers, and two cities with two places each."""
    from ray.cluster_utils import Cluster

    here = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"role": "server"}, **here})
    cluster.cities = [cluster.add_node(num_cpus=3, labels={"city": city}, **here) for city in ("leipzig", "jena")]
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


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
        module.learn, workers=1, clusters=[{"city": "leipzig"}, {"city": "jena"}], labels={"role": "server"}, sync="ssp",
        compress="topk:0.5+sign", checkpoint_dir=str(tmp_path / "model"), host="127.0.0.1", report=seen.append, every_s=0.5,
    )  # fmt: skip
    assert load_file(result.model)["weight"].shape == (2, 4) and result.clock == 20 and result.values["loss"] > 0
    assert result.values["evaluated"] == 7
    places = {facts.node for progress in seen for facts in progress.workers.values()}
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
    with pytest.raises(NarrowsError, match=r"the server ended with exit code 2: .*unknown mode"):
        train(
            script, workers=1, sync="sometimes", checkpoint_dir=str(tmp_path / "other"), host="127.0.0.1", report=None
        )
    with pytest.raises(UsageError, match=r"workers=\(2, 1\)"):
        train(script, workers=(2, 1))
    with pytest.raises(UsageError, match="a function that stands at the top of a file"):
        command_of(lambda: None, ())


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
            (far,) = [node for node in nodes.cities if node.node_id == progress.workers[2].node]
            lost.extend(pid for index, facts in progress.workers.items() if facts.node == far.node_id
                        for pid in (facts.pid, facts.process))  # fmt: skip
            nodes.remove_node(far, allow_graceful=False)

    result = train(
        script, ["400", "0.05"], workers=(2, 3), labels=None, sync="ssp", checkpoint_dir=str(tmp_path / "model"),
        host="127.0.0.1", report=strike, every_s=0.5, checkpoint_every=1,
    )  # fmt: skip
    assert struck == ["actor", "server", "node"] and result.clock == 400 and Path(result.model).exists()
    until(lambda: not any(map(alive, lost)), "what was on that node to be gone")
