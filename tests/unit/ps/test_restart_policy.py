"""Which of the shards that died begin again: five of each kind for each shard in a while, and then no more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from narrows.protocols.config.settings import Settings
from narrows.ps.command.restart_policy import (
    FAILED_S,
    KILLED_S,
    RESTARTS_MAX,
    LeftWithoutServer,
    Restart,
    RestartPolicy,
)
from narrows.ps.command.shard_supervisor import END_S, ShardSupervisor
from narrows.ps.journal.journal import NAMES

SHARDS = 2


@pytest.fixture
def lives() -> Iterator[RestartPolicy]:
    made = RestartPolicy(SHARDS)
    for shard in range(SHARDS):
        made.begin(shard)
        made.serving.add(shard)
    yield made
    for shard in range(SHARDS):
        made.forget(shard)


@pytest.mark.parametrize(("code", "again", "while_s"), [
    (-9, Restart.JOURNAL, KILLED_S),
    (1, Restart.CHECKPOINT, FAILED_S),
])  # fmt: skip
def test_so_often_in_a_while(code: int, again: Restart, while_s: float, lives: RestartPolicy) -> None:
    most = RESTARTS_MAX * SHARDS
    for count in range(most):
        lives.serving.add(count % SHARDS)
        assert lives.ended(count % SHARDS, code, now=float(count)) is again
    lives.serving.add(0)
    assert lives.ended(0, code, now=while_s - 1) is Restart.NOT, "the first of them was not so long ago"
    lives.serving.add(0)
    assert lives.ended(0, code, now=while_s + 1) is again and lives.restarts == most + 1


def test_where_there_are_more_shards_more_may_die(lives: RestartPolicy) -> None:
    for count in range(RESTARTS_MAX * SHARDS):
        lives.serving.add(0)
        lives.ended(0, -9, now=float(count))
    lives.finished(SHARDS + 1)
    for again in [*[Restart.JOURNAL] * RESTARTS_MAX, Restart.NOT]:
        lives.serving.add(0)
        assert lives.ended(0, -9, now=KILLED_S - 1) is again


def test_the_two_kinds_are_counted_apart(lives: RestartPolicy) -> None:
    for count in range(RESTARTS_MAX * SHARDS):
        assert lives.ended(1, 1, now=float(count)) is Restart.CHECKPOINT
    assert lives.ended(0, -9, now=20.0) is Restart.JOURNAL


def test_a_new_life_has_an_empty_journal(lives: RestartPolicy) -> None:
    file = lives.files[0][0]
    os.write(file, b"of the life before")
    lives.begin(0)
    assert [os.fstat(each).st_size for each in lives.files[0][: len(NAMES)]] == [0] * len(NAMES)
    lives.forget(0)
    assert 0 not in lives.files and lives.ended(0, -9, now=0.0) is Restart.CHECKPOINT, "with no journal"


def test_a_stage_ends_once_its_last_worker_is_lost_and_nobody_has_come_within_the_grace() -> None:
    stage, other = LeftWithoutServer(5.0), LeftWithoutServer(0.0)
    for live, how, now in ((2, "joined", 0.0), (1, "stopped", 1.0), (0, "expired", 2.0)):
        for each in (stage, other):
            each.heard(live, how, now)
    assert not stage.ends(6.9) and stage.ends(7.1) and stage.finished and not stage.ends(9.0)
    assert not other.ends(1e9)  # it is no stage: workers may come again
    back, done, never = LeftWithoutServer(5.0), LeftWithoutServer(5.0), LeftWithoutServer(5.0)
    back.heard(1, "joined", 0.0)
    back.heard(0, "stopped", 1.0)
    back.heard(1, "joined", 4.0)
    done.heard(1, "joined", 0.0)
    done.heard(0, "left", 1.0)
    assert not any(each.ends(99.0) for each in (back, done, never))


def test_a_last_checkpoint_of_a_large_model_has_time() -> None:
    """A shard that is stopped writes it, and was killed after 40 s."""
    cluster = ShardSupervisor(Settings(shards=2).validated())
    assert cluster.end_s == END_S
    cluster._taken((1, "alive", {"within": 515.0, "clock": -1}))  # 10 GB, to a slow disk
    assert cluster.end_s == 515.0
    cluster.kill()
