"""ps-serve --via: workers and clusters that meet their server in a mailbox, over a folder and over moto's server of S3."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit.mailboxes import BUCKET, S3_ENVIRONMENT, moto_server
from kit.processes import (
    Worker,
    finished,
    kill_all,
    loss_of,
    serving,
    sgd,
    small_model,
    started,
    until,
)
from kit.scripts import distance, flat

from narrows.protocols.runtime.mailbox.stores import MeteredStore, store_of
from narrows.protocols.runtime.network import key_files

LOCAL = ("--sync", "local", "--local-steps", "2", "--outer-lr", "1", "--outer-momentum", "0")
QUICK = ("--lease", "3")  # a dead worker is missed for so long
# A worker that keeps its model in a file, after as many steps as it is told.
TRAIN = """
import sys, torch
from narrows.worker import DistributedOptimizer, rank, record, step_count
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
while step_count() < int(sys.argv[1]):
    %s
    generator = torch.Generator().manual_seed(1000 * rank() + step_count())
    optimizer.zero_grad()
    loss = model(torch.randn(4, 6, generator=generator)).square().sum()
    loss.backward()
    optimizer.step()
    record(loss=loss.item())
optimizer.finish()
torch.save([each.detach() for each in model.parameters()], f"{sys.argv[2]}-{rank()}.pt")
"""
NAMES = (b"0.weight", b"2.bias", b"Linear", b"worker", b"clock")  # what is in messages, and must not be in objects


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/mailbox"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    folder = str(tmp_path / "K")
    key_files.make(folder)
    return folder


def key(keys: str, name: str, role: str = "worker") -> str:
    return str(key_files.add(keys, name, role))


def objects(address: str) -> dict[str, bytes]:
    """All that lies in a mailbox now."""
    store, found = store_of(address), dict[str, bytes]()
    for name in store.list(""):
        with suppress(FileNotFoundError):  # taken meanwhile
            found[name] = store.get(name)
    return found


def alone(rounds: int, first: int = 0) -> Model:
    """The parameters that one `Worker` ends with after rounds of two local steps."""
    model = small_model()
    optimizer = sgd(model)
    for step in range(2 * first, 2 * rounds):
        optimizer.zero_grad()
        loss_of(model, step // 2).backward()
        optimizer.step()
    return flat(model)


Model = npt.NDArray[np.float32]


def kept(cwd: Path, name: str) -> list[Model]:
    """The models that the workers of `TRAIN` have kept under this name, by rank."""
    found = [torch.load(path) for path in sorted(cwd.glob(f"{name}-*.pt"))]
    return [np.concatenate([part.numpy().ravel() for part in parts]) for parts in found]


def trained(where: tuple[str, ...], cwd: Path, each: Sequence[tuple[str, ...]], steps: int = 8) -> list[Model]:
    """Start a worker with each of these flags, and return the models that they end with.

    Args:
        where: flags of all.
        cwd: their folder.
        each: flags of one worker each.
        steps: that they make.
    """
    (cwd / "train.py").write_text(TRAIN % "")
    name = f"model-{os.urandom(4).hex()}"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(started("ps-worker", *where, *own, "train.py", str(steps), name, cwd=cwd))
            for own in each
        ]
        for worker in workers:
            assert worker.wait() == 0, worker
    return kept(cwd, name)


def test_a_run_through_a_folder_ends_as_a_run_alone(folder: str, keys: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving("--via", folder, "--keys", keys, "--shards", "2", *LOCAL, "--record", str(record)) as server:
        assert server.address == folder and f"ps-worker --server {folder} --key NAME.key" in server.command.out
        worker = Worker(folder, key(keys, "city"))
        worker.train(6)
        assert worker.session.link.ways == ["mailbox"] * 2
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        worker.close()
        assert "shard 1 asked" in server.command.out and " PUT, " in server.command.out
    assert distance(flat(worker.model), alone(3)) < 1e-6
    assert not objects(folder)
    told = [json.loads(line) for line in record.read_text().splitlines()]
    asked = [each for each in told if each["event"] == "mailbox"]
    assert {each["shard"] for each in asked} == {0, 1} and all(each["puts"] and each["bytes_up"] for each in asked[-2:])


def test_two_workers_end_with_the_models_of_a_run_over_sockets(folder: str, keys: str, tmp_path: Path) -> None:
    flags = ("--keys", keys, "--workers", "2", "--shards", "2", *LOCAL, "--compress", "int8")
    each = [("--key", key(keys, name)) for name in ("leipzig", "jena")]
    with serving(*flags) as server:
        by_sockets = trained(("--server", server.address), tmp_path, each)
        assert server.command.wait() == 0, server.command
    with serving("--via", folder, *flags) as server:
        by_mailbox = trained(("--via", folder), tmp_path, each)
        assert server.command.wait() == 0, server.command
    assert len(by_mailbox) == len(by_sockets) == 2
    for one, other in zip(by_mailbox, by_sockets, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_that_is_killed_goes_on_and_its_members_with_it(index: int, folder: str, keys: str) -> None:
    with serving("--via", folder, "--keys", keys, "--shards", "2", *LOCAL) as server:
        worker = Worker(folder, key(keys, "city"))
        worker.train(4)
        server.kill_shard(index)
        worker.train(4)
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        worker.close()
    assert distance(flat(worker.model), alone(4)) < 1e-6
    assert not objects(folder)


def test_the_others_go_on_without_a_worker_that_is_killed_and_it_comes_back(
    folder: str, keys: str, tmp_path: Path
) -> None:
    mine = "import os, time; open(f'pid-{sys.argv[2]}', 'w').write(str(os.getpid())); time.sleep(0.05)"
    (tmp_path / "train.py").write_text(TRAIN % mine)
    with serving("--via", folder, "--keys", keys, "--workers", "2", *LOCAL, *QUICK) as server:
        ways = [("--via", folder, "--key", key(keys, name)) for name in ("a", "b")]
        with (
            started("ps-worker", *ways[0], "train.py", "120", "m", cwd=tmp_path) as first,
            started("ps-worker", *ways[1], "--restarts", "1", "train.py", "120", "second", cwd=tmp_path) as second,
        ):
            until(lambda: "clock 3" in first.out + first.err, first)
            os.kill(int((tmp_path / "pid-second").read_text()), signal.SIGKILL)
            assert first.wait() == 0, (first, server.command)
            assert second.wait() == 0 and "started again" in second.err, second
        assert server.command.wait() == 0, server.command
        assert "worker 2" in server.command.out, server.command
    assert not objects(folder)


def test_a_worker_whose_command_is_killed_costs_a_lease(folder: str, keys: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN % "import time; time.sleep(0.05)")
    with serving("--via", folder, "--keys", keys, "--workers", "2", *LOCAL, *QUICK) as server:
        ways = [("--via", folder, "--key", key(keys, name)) for name in ("a", "b")]
        with (
            started("ps-worker", *ways[0], "train.py", "80", "m", cwd=tmp_path) as first,
            started("ps-worker", *ways[1], "train.py", "80", "m", cwd=tmp_path) as second,
        ):
            until(lambda: "clock 3" in first.out + first.err, first)
            kill_all(second.pid)
            assert first.wait() == 0, (first, server.command)
        assert server.command.wait() == 0, server.command
        assert "expired" in server.command.out, server.command


def test_a_server_that_is_killed_is_resumed_and_its_worker_goes_on(folder: str, keys: str, tmp_path: Path) -> None:
    flags = ("--via", folder, "--keys", keys, "--shards", "2", *LOCAL, "--checkpoint-dir", str(tmp_path / "C"))
    with serving(*flags, "--checkpoint-clocks", "1") as server:
        worker = Worker(folder, key(keys, "city"))
        worker.train(6)
        until(lambda: "shard 0: checkpoint of clock" in server.command.out, server.command)
        server.kill()
    assert objects(folder)  # nobody was left to remove them
    with serving(*flags, "--resume") as server:
        worker.train(4)
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        worker.close()
        assert "goes on from the checkpoint" in server.command.out
    assert not objects(folder) and (tmp_path / "C" / "model.safetensors").exists()


def test_a_worker_without_a_server_ends_in_a_sentence(folder: str, keys: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN % "")
    way = ("--via", folder, "--key", key(keys, "city"))
    code, _, said = finished("ps-worker", *way, "--connect-timeout", "2", "train.py", "9", "m", cwd=tmp_path)
    assert code == 3 and "no server answered within 2 s; check that ps-serve runs with this --via" in said, said
    assert not objects(folder)  # what it wrote is gone with it
    more = ("--server-timeout", "3", "train.py", "9999999", "m")
    with (
        serving("--via", folder, "--keys", keys, *LOCAL) as server,
        started("ps-worker", *way, *more, cwd=tmp_path) as worker,
    ):
        until(lambda: "clock 3" in worker.out + worker.err, worker)
        server.kill()
        assert worker.wait() == 6 and "the server has not answered" in worker.err, worker


def test_a_key_that_is_not_listed_gets_no_answer(folder: str, keys: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN % "")
    stranger = key(keys, "stranger")
    (Path(keys) / "members" / "stranger.json").unlink()
    with serving("--via", folder, "--keys", keys, *LOCAL) as server:
        way = ("--via", folder, "--key", stranger, "--connect-timeout", "3")
        code, _, said = finished("ps-worker", *way, "train.py", "9", "m", cwd=tmp_path)
        assert code == 3 and "lists this key" in said, said
        until(lambda: "its sender has no key on the list" in server.command.out, server.command)


def test_the_server_that_came_last_serves(folder: str, keys: str) -> None:
    flags = ("--via", folder, "--keys", keys, *LOCAL)
    with serving(*flags) as first, serving(*flags) as second:
        assert first.command.wait() == 6, first.command
        assert "another ps-serve with these keys has begun to serve there" in first.command.err + first.command.out
        worker = Worker(folder, key(keys, "city"))
        worker.train(2)
        worker.engine.finish()
        assert second.command.wait() == 0, second.command
        worker.close()


def test_keys_move_to_more_shards_while_a_run_goes_on(folder: str, keys: str) -> None:
    with serving("--via", folder, "--keys", keys, "--shards", "2", *LOCAL) as server:
        worker = Worker(folder, key(keys, "city"))
        worker.train(4)
        with started("ps-serve", "shards", "3", "--at", f"tcp://127.0.0.1:{server.port}") as command:
            while command.process.poll() is None:
                worker.train(2)
            assert "the keys of 2 shards are those of 3" in command.out, (command, server.command)
        worker.train(2)
        assert len(worker.session.link.ways) == 3
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        worker.close()
    assert not objects(folder)


# Two levels.


def cities(above: tuple[str, ...], address: str, keys: str, tmp_path: Path) -> list[Model]:
    """Train in two cities with two workers each below a root. Return the models of one worker of each."""
    flags = ("--shards", "2", "--workers", "2", "--sync", "bsp")
    parents = [("--parent", address or "", "--parent-key", key(keys, name, "cluster")) for name in ("leipzig", "jena")]
    with serving(*above, "--keys", keys, "--workers", "2", "--shards", "2", *LOCAL) as root:
        parents = [("--parent", address or root.address, "--parent-key", path) for *_, path in parents]
        with serving(*flags, *parents[0]) as one, serving(*flags, *parents[1]) as other, ExitStack() as stack:
            (tmp_path / "train.py").write_text(TRAIN % "")
            name = f"city-{os.urandom(4).hex()}"
            for city in (one, other):
                words = ("ps-worker", "--server", city.address, "-n", "2", "train.py", "8", name)
                stack.enter_context(started(*words, cwd=tmp_path))
            for server in (one, other, root):
                assert server.command.wait() == 0, (server.command, root.command)
    return kept(tmp_path, name)


def test_two_clusters_that_meet_in_a_mailbox_end_with_the_model_of_clusters_over_sockets(
    folder: str, keys: str, tmp_path: Path
) -> None:
    by_mailbox = cities(("--via", folder), folder, keys, tmp_path)
    assert not objects(folder)
    for name in ("leipzig", "jena"):
        key_files.revoke(keys, name)
    by_sockets = cities((), "", keys, tmp_path)
    assert len(by_mailbox) == len(by_sockets) == 4
    for one in by_mailbox:
        assert np.allclose(one, by_sockets[0], atol=1e-6)


# What the owner of a store sees.


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with moto_server() as url:
        yield S3_ENVIRONMENT | {"AWS_ENDPOINT_URL": url}


def known(model: Model) -> set[bytes]:
    """Runs of known values as they would stand in a message: float32, bfloat16, float16."""
    halves = (model.view(np.uint32) >> 16).astype(np.uint16)
    kinds: list[npt.NDArray[Any]] = [model, halves, model.astype(np.float16)]
    return {each[at : at + 4].tobytes() for each in kinds for at in range(0, len(each) - 4, 4)}


@pytest.mark.parametrize("spec", ["dense", "bf16", "int8"])
def test_nothing_of_a_run_can_be_read_in_a_bucket(
    spec: str, bucket: dict[str, str], keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and values of the model are looked for in all that ever was put."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    address = f"s3://{BUCKET}/{spec}-{os.urandom(4).hex()}"
    seen, models = dict[str, bytes](), list[Model]()
    put = MeteredStore.put

    def seen_put(store: MeteredStore, name: str, content: bytes) -> None:
        seen[name] = content
        put(store, name, content)

    monkeypatch.setattr(MeteredStore, "put", seen_put)
    flags = ("--via", address, "--keys", keys, "--shards", "2", *LOCAL, "--compress", spec, "--compress-down", spec)
    with serving(*flags, env=bucket) as server:
        worker = Worker(address, key(keys, "city"))
        for _ in range(3):
            models.append(flat(worker.model))
            worker.train(2)
            seen |= objects(address)
        models.append(flat(worker.model))
        worker.engine.finish()
        assert server.command.wait() == 0, server.command
        worker.close()
    assert len(seen) > 10
    readable = set.union(*map(known, models)) | set(NAMES)
    for name, content in seen.items():
        assert not any(each in content or each in name.encode() for each in readable)
    assert any(each in models[0].tobytes() for each in known(models[0]))  # the search finds what is there
    assert not objects(address)


# What does not go.


@pytest.mark.parametrize(("flags", "said"), [
    (("--sync", "bsp"), "--sync bsp makes a round trip for each step"),
    (("--sync", "ssp"), "--sync ssp makes a round trip for each step"),
    (("--sync", "async"), "--sync async makes a round trip for each step"),
    (("--sync", "gossip"), "--sync gossip makes a round trip for each step"),
    ((*LOCAL, "--start-steps", "5"), "--start-steps makes a round trip for each step"),
    ((*LOCAL, "--replan", "change"), "--replan change may choose a mode"),
    ((*LOCAL, "--replicas", "1"), "--replicas needs processes that dial each other"),
    ((*LOCAL, "--standby", "tcp://127.0.0.1:1"), "--standby needs processes that dial each other"),
    ((*LOCAL, "--join", "tcp://127.0.0.1:1"), "--join needs processes that dial each other"),
    ((*LOCAL, "--one-port"), "--one-port needs processes that dial each other"),
    ((*LOCAL, "--bind", "tcp://0.0.0.0:0"), "no other machine dials this server"),
])  # fmt: skip
def test_what_does_not_go_with_a_mailbox_is_refused(flags: tuple[str, ...], said: str, folder: str, keys: str) -> None:
    code, _, text = finished("ps-serve", "--via", folder, "--keys", keys, "--checkpoint-dir", "none", *flags)
    assert code == 2 and said in text, text


def test_a_mailbox_needs_keys_and_a_store(folder: str, keys: str, tmp_path: Path) -> None:
    none = ("--checkpoint-dir", "none", *LOCAL)
    (tmp_path / "train.py").write_text(TRAIN % "")
    city, mine = key(keys, "city", "cluster"), key(keys, "mine")
    for words, code, said in [
        (("ps-serve", "--via", folder, *none), 2, "ps-serve keys init DIR makes keys for --keys DIR"),
        (("ps-serve", "--via", "s3://bucket", "--keys", keys, *none), 2, "write it as s3://BUCKET/RUN"),
        (("ps-serve", "--via", f"file://{tmp_path}/no/such", "--keys", keys, *none), 2, "there is no such folder"),
        (("ps-serve", "--parent", folder, "--bind", "tcp://127.0.0.1:0", *none), 2, "with --parent-key"),
        (("ps-serve", "--parent", folder, "--parent-key", city, "--replicas", "1", *none), 2, "--replicas needs"),
        (
            ("ps-serve", "--via", folder, "--keys", keys, "--parent", folder, "--parent-key", city, *none),
            2,
            "another RUN",
        ),
        (("ps-worker", "--via", folder, "train.py"), 2, "with --key"),
        (("ps-worker", "--via", f"file://{tmp_path}/no/such", "--key", mine, "train.py"), 2, "there is no such folder"),
    ]:
        found, _, text = finished(*words, cwd=tmp_path)
        assert found == code and said in text, (words, text)
