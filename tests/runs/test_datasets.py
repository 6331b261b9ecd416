"""The sampler of a run, and loaders that go on with it: shares of each epoch, by the run's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kit.scripts import Run, alone, build, loss_of, run
from torch.utils.data import DataLoader

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer, ranges, resumable, sampler, step_count
from narrows.worker.data.loader_states import superfluous

SAMPLES, BATCH = 103, 8


def epochs(started: Run, worker: int, count: int, leave: int = -1) -> list[list[int]]:
    """The indices of each epoch that this worker trained on; it leaves in the step `leave`."""
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    data: Any = list(range(SAMPLES))
    loader: Any = DataLoader(data, BATCH, sampler=sampler(data, BATCH))
    seen: list[list[int]] = []
    step = 0
    for _ in range(count):
        seen.append([])
        for batch in loader:
            if step == leave:
                return seen
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen[-1] += batch.tolist()
            step += 1
    optimizer.finish()
    return seen


def test_shares_are_apart_and_each_epoch_has_an_order_of_its_own() -> None:
    with run(Settings(sync="ssp", workers=3)) as started:
        told = started.together(lambda worker: epochs(started, worker, 3))
    for epoch in range(3):
        shares = [seen[epoch] for seen in told]
        assert [len(share) for share in shares] == [SAMPLES // 3] * 3
        assert len({index for share in shares for index in share}) == SAMPLES // 3 * 3
    assert told[0][0] != told[0][1] and {*told[0][0]} != {*told[0][1]}


def test_who_joins_in_the_middle_goes_on_there() -> None:
    with run(Settings(sync="async", workers=1)) as started:
        whole = epochs(started, 0, 2)
    with run(Settings(sync="async", workers=1)) as started:
        begun = epochs(started, 0, 2, leave=17)  # 13 steps an epoch
        started.expire(0)
        started.join()
        again = epochs(started, 1, 1)
    assert begun[0] + begun[1] + again[0] == whole[0] + whole[1]
    assert len(again[0]) == len(whole[1]) - 4 * BATCH


def passes(count: int, data: Iterable[Any]) -> Iterator[None]:
    """Steps, each of so many items of the data."""
    for place, _ in enumerate(data, 1):
        if place % count == 0:
            yield


SAMPLED: dict[str, tuple[int, Callable[[Any], Iterator[None]]]] = {
    "nobody says": (0, lambda optimizer: passes(1, range(3))),
    "step_samples": (5, lambda optimizer: (optimizer.step_samples(5) for _ in range(3))),
    "sampler": (BATCH, lambda optimizer: passes(BATCH, sampler(range(3 * BATCH), BATCH))),
    "ranges": (2 * BATCH, lambda optimizer: passes(2, ranges(6 * BATCH, BATCH))),
}


@pytest.mark.parametrize("how", SAMPLED)
def test_a_worker_tells_the_samples_of_its_steps_where_somebody_has_said_how_many(how: str) -> None:
    each, steps = SAMPLED[how]
    with run(Settings(sync="ssp", workers=1)) as started:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for step, _ in enumerate(steps(optimizer)):
            loss_of(model, step).backward()
            optimizer.step()
        (row,) = started.sessions[0].figures.rows()
        assert (row.summary.steps, row.summary.samples) == (3, 3 * each)
        optimizer.finish()


def test_alone_it_has_all() -> None:
    with alone():
        assert sorted(sampler(range(7), 2)) == list(range(7))
        assert list(sampler(range(7), 2, shuffle=False)) == list(range(7))
        with pytest.raises(UsageError, match="a dataset of 0 samples has none for each of 1 workers"):
            sampler([], 2)
        with pytest.raises(UsageError, match="batch=0"):
            sampler(range(7), 0)
        with pytest.raises(UsageError, match="has 7 samples, which make no whole step of 8: lower batch="):
            sampler(range(7), 8, drop_last=True)
        with pytest.raises(UsageError, match="steps=-1"):
            sampler(range(7), 2, steps=-1)


def alone_loop(
    steps: int, samples: int, loader_batch: int, drop_last: bool, of_sampler: dict[str, Any]
) -> list[list[int]]:
    """The indices of each pass of `while step < steps: for batch in loader`, without another worker."""
    model, data = build(), cast(Any, list(range(samples)))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader: Any = DataLoader(data, loader_batch, drop_last=drop_last, sampler=sampler(data, **of_sampler))
    seen: list[list[int]] = []
    while step_count() < steps:
        seen.append([])
        for batch in loader:
            loss_of(model, 0).backward()
            optimizer.step()
            seen[-1] += batch.tolist()
            if step_count() == steps:
                break
    return seen


LOOPS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "the loader drops its last batch": (4, True, {"batch": 4}),
    "both drop it": (4, True, {"batch": 4, "drop_last": True}),
    "the sampler drops it": (4, False, {"batch": 4, "drop_last": True}),
    "a step has less than the loader's batch": (4, True, {"batch": 1}),
    "a step has more than the loader's batch": (2, False, {"batch": 4}),
    "as it should be": (4, False, {"batch": 4}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_passes_never_reads_one_tail_for_ever(name: str) -> None:
    loader_batch, drop_last, of_sampler = LOOPS[name]
    with alone():
        seen = alone_loop(11, 10, loader_batch, drop_last, of_sampler)
    assert all(seen), "no pass is empty"
    if name != "a step has more than the loader's batch":  # which leaves out what it takes for used
        used = 10 if name == "as it should be" else 8
        assert [len(each) for each in seen[:-1]] == [used] * (len(seen) - 1)
        assert len({tuple(each) for each in seen[:-1]}) == len(seen) - 1, "each pass has an epoch of its own"


def test_a_loader_that_gives_no_batch_is_an_error_and_no_endless_loop() -> None:
    with (
        alone(),
        pytest.raises(UsageError, match=r"100 passes over the data were made without a step: .* has 5 samples"),
    ):
        alone_loop(1, 5, 8, True, {"batch": 8})


def test_who_only_looks_at_the_data_passes_over_the_same_epoch() -> None:
    with alone():
        indices = sampler(range(10), 4)
        assert list(indices) == list(indices)


def test_with_steps_one_pass_is_the_whole_run() -> None:
    """Each epoch has whole steps alone, and who comes later goes on in the middle."""
    with alone() as session:
        whole = list(sampler(range(10), 4, steps=5))
        assert len(whole) == 20 and len(sampler(range(10), 4, steps=5)) == 20
        epochs = [whole[:8], whole[8:16], whole[16:]]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs) and epochs[0] != epochs[1]
        assert whole[:10] != list(sampler(range(10), 4)) and whole[:8] == list(sampler(range(10), 4, drop_last=True))
        session.stepped_count = 3
        late = sampler(range(10), 4, steps=5)
        assert len(late) == 8 and list(late) == whole[12:]
        session.stepped_count = 5
        assert len(late) == 0 and list(late) == []


def trained(count: int, leave: int = -1) -> tuple[list[tuple[int, list[int], float]], bool]:
    """Of each epoch that this worker trained: number, indices and rate; it leaves in its step `leave`. And whether the module
    shows the run's model."""
    model, data = build(), cast(Any, list(range(SAMPLES)))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = DistributedOptimizer(inner, model)
    share = sampler(data, BATCH)
    loader: Any = DataLoader(data, BATCH, sampler=share)
    seen: list[tuple[int, list[int], float]] = []
    step = 0
    for epoch in share.epochs(count, schedule):
        seen.append((epoch, [], inner.param_groups[0]["lr"]))
        assert share.epoch == epoch
        for batch in loader:
            if step == leave:
                return seen, optimizer._ended
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen[-1][1].extend(batch.tolist())
            step += 1
        schedule.step()
    return seen, optimizer._ended


@pytest.mark.parametrize("left", [13 + 4, 2 * 13], ids=["in an epoch", "between two"])
def test_a_loop_over_epochs_goes_on_with_the_epoch_and_the_rate_of_the_run(left: int) -> None:
    """13 steps an epoch. The second worker has the rest of the epoch, and no epoch that was made."""
    with run(Settings(sync="async", workers=1)):
        whole, shown = trained(3)
    assert shown and [epoch for epoch, _, _ in whole] == [0, 1, 2]
    assert [rate for _, _, rate in whole] == [1.0, 0.5, 0.25]
    assert len({tuple(indices) for _, indices, _ in whole}) == 3
    with run(Settings(sync="async", workers=1)) as started:
        begun, _ = trained(3, leave=left)
        started.expire(0)
        started.join()
        again, shown = trained(3)
        assert trained_after(started) == []
    assert shown and [(epoch, rate) for epoch, _, rate in again] == [
        (epoch, 0.5**epoch) for epoch in range(left // 13, 3)
    ]
    read, unbroken = ([index for _, indices, _ in each for index in indices] for each in (begun + again, whole))
    assert read == unbroken


def test_nobody_knows_the_epoch_before_the_run_is_joined() -> None:
    with run(Settings(sync="async", workers=1)) as started:
        started.become(0)
        share = sampler(range(10), 4)
        asks: list[Callable[[], int]] = [lambda: share.epoch, lambda: next(share.epochs(3))]
        for ask in asks:
            with pytest.raises(UsageError, match="before DistributedOptimizer was made"):
                ask()


def trained_after(started: Run) -> list[tuple[int, list[int], float]]:
    """Epochs of a worker that comes once the run has made all."""
    started.expire(1)
    started.join()
    return trained(3)[0]


def test_epochs_end_each_after_its_share_however_the_body_reads_it() -> None:
    with alone() as session:
        share = sampler(range(10), 4, shuffle=False)
        lengths = []
        for epoch in share.epochs(3):
            lengths.append(len(list(share)))  # looks at the data
            for place, _ in enumerate(share):
                session.stepped_count += place % 4 == 3 or place == 9
                if epoch == 1:
                    break
            lengths.append(len(list(share)))  # evaluates on what it has trained
        assert lengths == [10, 10, 10, 10, 10, 10] and session.steps == 9
        assert list(share.epochs(0)) == [] and share.epoch == session.stepped_count // 3
        with pytest.raises(UsageError, match=r"epochs\(-1\): give the epochs of the whole run"):
            share.epochs(-1)
        with pytest.raises(UsageError, match=r"epochs\(\) and steps=9"):
            sampler(range(10), 4, steps=9).epochs(3)


def test_a_batch_that_is_no_step_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        alone_loop(9, 40, 8, False, {"batch": 2})
    told = capsys.readouterr().err
    assert told.count("sampler(batch=2) counts 20 steps in a pass over the data, and this worker has made 5:") == 1


class Stream:
    """A loader that keeps its place, as StatefulDataLoader does: 13 batches an epoch, 0 to 12, 100 to 112 and so on."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0
        self.fetched = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 13:
            self.place += 1
            self.fetched += 1
            yield 100 * self.epoch + self.place - 1
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def streamed(steps: int, batches: int, folder: Path) -> tuple[list[int], int]:
    """The rows that this worker trained on in so many steps, and how many batches it has fetched."""
    model, stream = build(), Stream()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    rows = resumable(stream, folder, batches=batches, every=5)
    seen: list[int] = []
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(batches):
            seen.append(next(rows))
            loss_of(model, step).backward()
        optimizer.step()
    return seen, stream.fetched


WHOLE = [100 * epoch + place for epoch in range(10) for place in range(13)]


@pytest.mark.parametrize("batches", [1, 3])
def test_a_loader_goes_on_where_the_run_does(batches: int, tmp_path: Path) -> None:
    with run(Settings(sync="async", workers=1)) as started:
        seen, _ = streamed(17, batches, tmp_path)
        started.expire(0)
        started.join()
        again, fetched = streamed(4, batches, tmp_path)
        assert seen + again == WHOLE[: 21 * batches]
        assert fetched == (17 - 15 + 4) * batches, "it was loaded, and only two steps were read past"
        started.expire(1)
        started.join()
        for path in tmp_path.iterdir():
            path.unlink()
        assert streamed(1, batches, tmp_path)[0] == WHOLE[21 * batches : 22 * batches], (
            "without a state it reads past all"
        )


def test_a_loader_ends_with_the_steps_of_the_run(tmp_path: Path) -> None:
    with run(Settings(sync="async", workers=1)) as started:
        streamed(17, 1, tmp_path)
        started.expire(0)
        started.join()
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        seen = []
        for rows in resumable(Stream(), tmp_path, steps=30):
            seen.append(rows)
            loss_of(model, 0).backward()
            optimizer.step()
        assert seen == WHOLE[17:30] and optimizer._ended
        assert list(resumable(Stream(), tmp_path, steps=30)) == []


def test_a_run_that_goes_back_deletes_what_is_ahead_of_it(tmp_path: Path) -> None:
    """As after a checkpoint of clock 12: the states of steps 15 and 20 are of another future."""
    with run(Settings(sync="async", workers=1)):
        streamed(21, 1, tmp_path)
    ahead = {"narrows-loader-0-of-1.step-15.pt", "narrows-loader-0-of-1.step-20.pt"}
    assert ahead <= {path.name for path in tmp_path.iterdir()}
    with run(Settings(sync="async", workers=1)) as started:
        streamed(12, 1, tmp_path / "other")
        for path in (tmp_path / "other").iterdir():
            path.rename(tmp_path / path.name)
        started.expire(0)
        started.join()
        assert streamed(1, 1, tmp_path)[0] == WHOLE[12:13]
    assert not ahead & {path.name for path in tmp_path.iterdir()}


def test_states_of_an_earlier_run_and_files_of_the_user_are_kept(tmp_path: Path) -> None:
    theirs = {"loader-0-of-1.step-best.pt", "loader-0-of-1.step-5.pt"}
    for name in theirs:
        (tmp_path / name).write_text(name)
    with run(Settings(sync="async", workers=1)):
        streamed(11, 1, tmp_path)
    ours = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in theirs}
    assert len(ours) == 2
    with run(Settings(sync="async", workers=1)):
        assert streamed(1, 1, tmp_path)[0] == WHOLE[:1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in theirs} == {
        f"{name}.1": content for name, content in ours.items()
    }
    assert all((tmp_path / name).read_text() == name for name in theirs)


@pytest.mark.parametrize("every", [1, 7])
def test_few_states_are_kept_and_none_is_far_before_any_clock(every: int) -> None:
    kept: list[int] = []
    for newest in range(every, 200 * every, every):
        kept.append(newest)
        kept = [step for step in kept if step not in superfluous(kept)]
        assert len(kept) <= 2 * (newest // every).bit_length()
        for clock in range(newest):
            passed = clock - max([step for step in kept if step <= clock], default=0)
            assert passed < max(every, newest - clock + 1), (newest, clock, kept)


def test_what_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    class Empty(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    plain: Any = DataLoader([1, 2], 1)  # type: ignore[arg-type]
    with run(Settings(sync="async", workers=1)) as started:
        with pytest.raises(UsageError, match="a DataLoader, which has no state_dict"):
            resumable(plain, tmp_path)
        with pytest.raises(UsageError, match="batches=0"):
            resumable(Stream(), tmp_path, batches=0)
        started.become(0)
        with pytest.raises(UsageError, match="before DistributedOptimizer was made"):
            next(resumable(Stream(), tmp_path))
        model = build()
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        with pytest.raises(UsageError, match="the loader of rank 0 has no batch"):
            next(resumable(Empty(), tmp_path))
    with alone():
        assert next(resumable(Stream(), tmp_path)) == 0
