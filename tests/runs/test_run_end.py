"""How a run ends where its workers do not take as many steps: all that wait end with one model, the one of the checkpoint."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, store_of
from kit.scripts import Array, alone, build, flat, loss_of, run, seeded, tree
from kit.specs import MODES, NO_QUORUM, WITH_SERVER
from torch import nn

from narrows.protocols import messages as m
from narrows.protocols.config.checkpoint_names import ROUND, round_file
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import MODEL_HAND_OVER_NS
from narrows.protocols.effects import Send
from narrows.ps.command.shard_supervisor import ShardSupervisor
from narrows.worker import DistributedOptimizer, agree, rank, step_count, world_size
from narrows.worker.checkpoint import gossip_checkpoints
from narrows.worker.checkpoint.gossip_checkpoints import GossipCheckpoints
from narrows.worker.sync.gossip import GossipStep


def steps(
    model: nn.Module, optimizer: DistributedOptimizer, count: int, after_each: Callable[[], None] = lambda: None
) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, step, rank(), world_size()).backward()
        optimizer.step()
        after_each()


def begun() -> tuple[nn.Module, DistributedOptimizer]:
    model = build()
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)


def of_the_server(cluster: Cluster) -> Array:
    return np.concatenate([store_of(server).x for server in cluster.servers])


@pytest.mark.parametrize("mode", WITH_SERVER)
def test_workers_with_fewer_steps_wait_and_all_end_with_one_model(mode: str) -> None:
    last = threading.Event()  # worker 1 has taken its last step
    halted = threading.Event()
    with run(Settings(**MODES[mode], workers=2)) as started:

        def work(worker: int) -> tuple[Array, bool]:
            model, optimizer = begun()
            steps(model, optimizer, 4)
            if worker:
                assert halted.wait(30.0)
                steps(model, optimizer, 9)
                last.set()
            else:
                halted.set()
            optimizer.finish()
            return flat(model), last.is_set()

        (first, late), (second, _) = started.together(work)
        assert late, "worker 0 ended before the last step of worker 1"
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, of_the_server(started.cluster))
        assert started.cluster.stopped is not None


def test_cities_with_fewer_steps_wait_for_the_others() -> None:
    root = Cluster(Settings(sync="ssp", staleness=1, workers=2))
    cities = [Cluster(Settings(sync="bsp", push="update", workers=1), root, name) for name in ("a", "b")]
    with tree(root, *cities) as started:

        def work(worker: int) -> Array:
            model, optimizer = begun()
            steps(model, optimizer, 11 if worker else 3)
            optimizer.finish()
            return flat(model)

        first, second = started.together(work)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, of_the_server(root))


def test_module_buffers_are_one_too_where_the_lowest_rank_ends_first() -> None:
    def normed() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(9, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5)))

    with run(Settings(sync="ssp", staleness=1, workers=2)) as started:

        def work(worker: int) -> list[bytes]:
            model = normed()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
            steps(model, optimizer, 9 if worker else 3)
            with optimizer.shared():  # the lowest rank may be done by now, and answers all the same
                pass
            optimizer.finish()
            return [buffer.numpy().tobytes() for buffer in model.buffers()]

        first, second = started.together(work)
        assert first == second


@pytest.mark.parametrize("mode", WITH_SERVER)
def test_leave_waits_for_no_other_worker_to_end(mode: str) -> None:
    left = threading.Event()
    with run(Settings(**MODES[mode], workers=2)) as started:

        def work(worker: int) -> Array:
            model, optimizer = begun()
            steps(model, optimizer, 4)
            if worker == 0:
                optimizer.leave()
                left.set()
                return flat(model)
            steps(model, optimizer, 5)  # at a barrier the clock of worker 0's last update closes with one of these
            assert left.wait(30.0)
            steps(model, optimizer, 3)
            optimizer.finish()
            return flat(model)

        first, second = started.together(work)
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(second, of_the_server(started.cluster))


def test_under_gossip_a_worker_that_leaves_keeps_its_model_and_the_others_end_with_the_mean_of_theirs() -> None:
    with run(Settings(sync="gossip", staleness=1, workers=3)) as started:
        left = threading.Event()
        before: dict[int, Array] = {}

        def work(worker: int) -> Array:
            model, optimizer = begun()
            steps(model, optimizer, 3)
            if worker == 2:
                before[2] = flat(model)
                optimizer.leave()
                left.set()
                np.testing.assert_array_equal(flat(model), before[2])
                return flat(model)
            assert left.wait(30.0)
            steps(model, optimizer, 4 + 3 * worker)
            optimizer.finish()
            return flat(model)

        first, second, third = started.together(work)
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, third)
        np.testing.assert_array_equal(first, of_the_server(started.cluster))


def test_a_worker_that_dies_is_not_waited_for_and_none_joins_once_all_have_ended() -> None:
    with run(Settings(sync="async", workers=2)) as started:
        halted = threading.Event()

        def work(worker: int) -> Array | None:
            model, optimizer = begun()
            steps(model, optimizer, 3)
            if worker:
                assert halted.wait(30.0)
                optimizer._engine.leave(-1)  # type: ignore[union-attr]
                return None
            halted.set()
            optimizer.finish()
            return flat(model)

        model, _ = started.together(work)
        np.testing.assert_array_equal(model, of_the_server(started.cluster))
    decided = Cluster(Settings(sync="ssp", workers=2))
    coordinator = decided.servers[0].coordinator
    assert coordinator is not None
    coordinator.parent_place.finishes = 1
    effects = coordinator.handle(b"late", m.Hello("late", "here"), decided.now())
    (refused,) = (effect.message for effect in effects if isinstance(effect, Send))
    assert isinstance(refused, m.Refuse) and refused.code == m.RefuseCode.OVER and "last step" in refused.text


# Agreeing on a number, as early stopping does.


@pytest.mark.parametrize("mode", NO_QUORUM)
def test_all_workers_stop_at_the_same_step(mode: str) -> None:
    with run(Settings(**MODES[mode], workers=3)) as started:

        def work(worker: int) -> tuple[int, list[float], Array]:
            model, optimizer = begun()
            said: list[float] = []
            for step in range(40):
                optimizer.zero_grad()
                loss_of(model, step, rank(), world_size()).backward()
                optimizer.step()
                if step % 4 == 3:
                    said += [agree(worker + step), agree(step > 9 + 4 * worker)]
                    if said[-1] > 0.5:  # two of three: worker 0 from step 11 on, worker 1 from 15
                        break
            optimizer.finish()
            return step, said, flat(model)

        (step, said, model), *others = started.together(work)
        assert step == 15
        assert said == pytest.approx([4, 0, 8, 0, 12, 1 / 3, 16, 2 / 3])
        for other, told, same in others:
            assert (other, told) == (step, said)
            np.testing.assert_array_equal(same, model)


def test_who_does_not_call_or_dies_or_has_ended_is_not_waited_for() -> None:
    with run(Settings(sync="bsp", workers=4)) as started:
        died = threading.Event()

        def work(worker: int) -> float:
            model, optimizer = begun()
            steps(model, optimizer, 2)
            if worker == 3:
                died.set()
                optimizer._engine.leave(-1)  # type: ignore[union-attr]
                return 0.0
            assert died.wait(30.0)
            if worker == 2:
                optimizer.finish()
                return 0.0
            said = agree(5.0) if worker == 0 else 0.0  # worker 1 goes on: its next update passes this step
            steps(model, optimizer, 2)
            said += 10 * agree(worker)
            optimizer.finish()
            return said

        assert started.together(work)[:2] == [10.0, 5.0]


def test_a_worker_that_comes_late_agrees_from_where_it_begins() -> None:
    with run(Settings(sync="ssp", staleness=1, workers=2)) as started:
        came = threading.Event()
        first: list[float] = []  # that the late one hears

        def script(says: float, said: list[float]) -> list[float]:
            model, optimizer = begun()
            if says == 9:
                came.set()
            while step_count() < 24:
                steps(model, optimizer, 1)
                if step_count() % 8 == 0:
                    said.append(agree(says))
                if step_count() == 9 and says < 9:
                    assert came.wait(30.0)
            optimizer.finish()
            return said

        def work(worker: int) -> list[float]:
            return script(1.0 + worker, [])

        results: list[Any] = []

        def both() -> None:
            results.extend(started.together(work))

        main = threading.Thread(target=both, name="in-process", daemon=True)
        main.start()
        until = time.monotonic() + 30.0
        while time.monotonic() < until and started.cluster.servers[0].coordinator.min_clock < 8:  # type: ignore[union-attr]
            time.sleep(0.01)
        started.join()
        started.aside(lambda: script(9.0, first)).join(60.0)
        main.join(60.0)
        assert results[0] == results[1] == [1.5, 4.0, 4.0] and first == [4.0, 4.0]


def test_cities_agree_over_all_workers() -> None:
    root = Cluster(Settings(sync="ssp", staleness=1, workers=2))
    cities = [
        Cluster(Settings(sync="bsp", push="update", workers=2), root, "a"),
        Cluster(Settings(sync="bsp", push="update", workers=2), root, "b"),
    ]
    with tree(root, *cities) as started:

        def work(worker: int) -> list[float]:
            model, optimizer = begun()
            said = []
            for _ in range(3):
                steps(model, optimizer, 2)
                said.append(agree(rank()))
            optimizer.finish()
            return said

        assert started.together(work) == [[1.5] * 3] * 4


def test_alone_it_is_what_it_says() -> None:
    with alone():
        assert agree(0.25) == 0.25


# A run of gossip that is stopped before its end: the workers have the model.


def gossips(started: Any, rounds: int, then: Callable[[int, nn.Module], Any]) -> list[Array]:
    def work(worker: int) -> Array:
        model, optimizer = begun()
        steps(model, optimizer, rounds)
        shown = optimizer._engine.sync.shared().copy()  # type: ignore[union-attr]
        then(worker, model)
        return np.asarray(shown)

    return cast(list[Array], started.together(work))


def test_workers_that_are_stopped_hand_over_and_the_server_has_their_mean() -> None:
    with run(Settings(sync="gossip", workers=3, shards=2)) as started:
        ready = threading.Barrier(3, timeout=30.0)

        def stop(worker: int, model: nn.Module) -> None:
            ready.wait()
            started.sessions[worker].close(failed=True, stopped=True)

        models = gossips(started, 5, stop)
        assert not np.array_equal(models[0], models[1])
        np.testing.assert_allclose(of_the_server(started.cluster), np.mean(models, axis=0), atol=1e-6)
        told = [log.values for log in started.cluster.logs if log.event == "handed over" and log.values["shard"] == 0]
        assert [(each["last"], each["stopped"]) for each in told] == [(False, 1), (False, 2), (False, 3)]


def test_a_server_that_is_stopped_asks_its_workers_for_their_models() -> None:
    with run(Settings(sync="gossip", workers=2)) as started:
        cluster, ready = started.cluster, threading.Barrier(2, timeout=30.0)
        given: list[Array] = [np.zeros(0, np.float32)] * 2

        def stop(worker: int, model: nn.Module) -> None:
            if ready.wait() == 0:
                with cluster.changed:
                    cluster._apply(0, cluster.servers[0].stop(cluster.now()))
                assert cluster.stopped is None, "the server ends before it has the models"
            ready.wait()
            given[worker] = np.asarray(started.sessions[worker].engine.sync.shared().copy())  # type: ignore[union-attr]
            started.sessions[worker].engine.waiting.poll()  # type: ignore[union-attr]  # as the next step does

        gossips(started, 4, stop)
        with cluster.changed:
            cluster._apply(0, cluster.servers[0].tick(cluster.now()))
        assert cluster.stopped is not None
        np.testing.assert_allclose(of_the_server(cluster), np.mean(given, axis=0), atol=1e-6)


def test_a_server_that_is_stopped_waits_for_no_worker_for_ever() -> None:
    with run(Settings(sync="gossip", workers=2)) as started:
        cluster = started.cluster
        gossips(started, 2, lambda worker, model: None)
        with cluster.changed:
            cluster._apply(0, cluster.servers[0].stop(cluster.now()))
            assert cluster.stopped is None
            cluster._apply(0, cluster.servers[0].tick(cluster.now() + MODEL_HAND_OVER_NS))
        assert cluster.stopped is not None


def test_the_console_says_whose_model_it_is() -> None:
    of = ShardSupervisor(Settings(sync="gossip"))
    assert of._whose(0).startswith("no worker has sent its model: the one with which the run began")
    of.handed = {"last": False, "stopped": 1}
    assert of._whose(0) == "the model of a worker that was stopped"
    of.handed = {"last": False, "stopped": 3}
    assert of._whose(0) == "the mean of the models of 3 workers that were stopped"
    of.handed = {"last": True, "stopped": 1}
    assert of._whose(0) == "the model that the workers ended with"
    assert ShardSupervisor(Settings(sync="bsp"))._whose(7) == "the model at clock 7"


# Checkpoints of gossip: each worker has its own.


def resuming(settings: Settings) -> Cluster:
    """A server that was started with --resume."""
    cluster = Cluster(settings)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    coordinator.checkpoint_schedule.resumed(from_workers=True)
    return cluster


def gossiped(
    folder: Path, cluster: Cluster, rounds: int, then: Callable[[int, DistributedOptimizer], Any]
) -> list[tuple[Array, int]]:
    """Each worker's first model and step; each has made so many rounds more before `then`."""
    with ExitStack() as ends:
        ends.enter_context(pytest.MonkeyPatch.context()).setenv("NARROWS_CHECKPOINT_DIR", str(folder))
        started = ends.enter_context(run(cluster.settings, cluster))

        def work(worker: int) -> tuple[Array, int]:
            model = build(seed=7 + worker + 10 * len([*folder.iterdir()]))
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
            first = flat(model), step_count()
            steps(
                model, optimizer, rounds, lambda: drop(worker, optimizer)
            )  # a round is left out while a file is written
            then(worker, optimizer)
            return first

        return cast(list[tuple[Array, int]], started.together(work))


def kept(folder: Path) -> dict[int, dict[int, Array]]:
    """The models of each round, by rank."""
    found: dict[int, dict[int, Array]] = {}
    for path in folder.iterdir():
        if match := ROUND.fullmatch(path.name):
            found.setdefault(int(match[2]), {})[int(match[1])] = torch.load(path)["model"].numpy()
    return found


SPARSELY = Settings(sync="gossip", workers=3, shards=2, checkpoint_clocks=4)


def drop(worker: int, optimizer: DistributedOptimizer) -> None:
    """As one that is killed, once its files are there."""
    sync = optimizer._engine.sync  # type: ignore[union-attr]
    assert isinstance(sync, GossipStep) and sync.checkpoints is not None
    sync.checkpoints.end()


def test_a_run_of_gossip_goes_on_with_the_mean_of_the_newest_round_that_a_majority_has(tmp_path: Path) -> None:
    gossiped(tmp_path, Cluster(SPARSELY), 13, drop)
    assert {number: sorted(models) for number, models in kept(tmp_path).items()} == {
        number: [0, 1, 2] for number in (4, 8, 12)
    }
    for rank_ in (0, 1):  # one worker alone has round 12, and two have round 8
        (tmp_path / round_file(rank_, 12)).unlink()
    (tmp_path / round_file(1, 8)).write_bytes(b"torn")
    models = kept_but(tmp_path, 8, {1})
    cluster = resuming(SPARSELY)
    begun_ = gossiped(tmp_path, cluster, 4, drop)
    assert [at for _, at in begun_] == [8, 8, 8]
    for first, _ in begun_:
        np.testing.assert_allclose(first, np.mean([models[0], models[2]], axis=0), atol=1e-6)
    texts = [log.values["text"] for log in cluster.logs if log.event == "resumed"]
    assert texts == ["the run goes on from round 8, with the mean of the models of 2 workers"]


def test_workers_that_are_stopped_in_different_rounds_give_the_models_that_they_have(tmp_path: Path) -> None:
    """Two of three have reached round 9. The first has no model of it, and gives that of round 10."""
    gossiped(tmp_path, Cluster(SPARSELY), 9, drop)
    models = kept(tmp_path)[8]
    for (number, rank_), model in {(10, 0): models[0] + 1, (9, 1): models[1], (6, 2): models[2]}.items():
        content = torch.load(tmp_path / round_file(rank_, 8)) | {"round": number, "model": torch.from_numpy(model)}
        torch.save(content, tmp_path / round_file(rank_, number))
    for rank_ in (1, 2):
        for number in (4, 8):
            (tmp_path / round_file(rank_, number)).unlink()
    cluster = resuming(SPARSELY)
    begun_ = gossiped(tmp_path, cluster, 4, drop)
    for first, at in begun_:
        assert at == 9
        np.testing.assert_allclose(first, np.mean([models[0] + 1, models[1]], axis=0), atol=1e-6)


def kept_but(folder: Path, number: int, without: set[int]) -> dict[int, Array]:
    paths = {rank_: folder / round_file(rank_, number) for rank_ in range(3) if rank_ not in without}
    return {rank_: torch.load(path)["model"].numpy() for rank_, path in paths.items()}


def test_without_a_majority_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    gossiped(tmp_path, Cluster(SPARSELY), 5, drop)
    for rank_ in (0, 1):
        (tmp_path / round_file(rank_, 4)).unlink()
    cluster = resuming(SPARSELY)
    assert [at for _, at in gossiped(tmp_path, cluster, 1, drop)] == [0, 0, 0]
    assert "so the run begins anew" in str(next(log.values["text"] for log in cluster.logs if log.event == "resumed"))
    assert not kept(tmp_path), "a later --resume must not find the run before"


def test_a_run_of_gossip_that_ended_or_was_stopped_goes_on_from_there(tmp_path: Path) -> None:
    def ends(worker: int, optimizer: DistributedOptimizer) -> None:
        optimizer.finish()

    gossiped(tmp_path, Cluster(SPARSELY), 6, ends)
    model = kept(tmp_path)[6][0]
    begun_ = gossiped(tmp_path, resuming(SPARSELY), 1, drop)
    assert [at for _, at in begun_] == [6, 6, 6]
    for first, _ in begun_:
        np.testing.assert_allclose(first, model, atol=1e-6)


def test_a_gossip_worker_copies_its_model_once_for_a_file_and_reads_none_to_list_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(tmp_path))
    with run(Settings(sync="gossip", workers=1)):
        model = nn.Linear(1023, 512)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        sync = cast(Any, optimizer._engine).sync
        assert isinstance(sync, GossipStep) and sync.checkpoints is not None
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            sync._keep(last=True)
            assert tracemalloc.get_traced_memory()[1] - before < 1.2 * 4 * 1024 * 512
        finally:
            tracemalloc.stop()
        calls, load = list[bool](), torch.load

        def noted(path: Path, mmap: bool, **named: Any) -> Any:
            calls.append(mmap)
            return load(path, mmap=mmap, **named)

        monkeypatch.setattr(torch, "load", noted)
        assert sync.checkpoints.models() == ((0, 0),) and calls == [True]
        found = sync.checkpoints.reached(0, 0)
        assert found is not None and np.array_equal(found, flat(model)) and calls[1:] == [False]


def test_files_are_of_rounds_that_slower_workers_have_too(tmp_path: Path) -> None:
    settings = Settings(sync="gossip", checkpoint_every=0.1)
    both = [GossipCheckpoints(settings, str(tmp_path), rank_, b"") for rank_ in (0, 1)]
    for files, round_s in zip(both, (0.01, 0.035), strict=True):  # of unequal pace: a file each 0.1 s or so
        with pytest.MonkeyPatch.context() as patch:
            now = [0.0]
            patch.setattr(gossip_checkpoints, "time", SimpleNamespace(monotonic=lambda now=now: now[0], time=time.time))
            files.begin(0)
            for number in range(1, 200):
                now[0] += round_s
                if files.due(number):
                    files.write(number, np.full(3, number, np.float32))
                    files.end()
    found = kept(tmp_path)
    assert max(number for number, models in found.items() if len(models) == 2) >= 128, sorted(found)
    assert all(len([path for path in tmp_path.iterdir() if f"-{rank_}." in path.name]) <= 4 for rank_ in (0, 1))
