"""Groups as processes: one worker of a run, which torch.distributed joins on its machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.processes import GONE_S, LIMIT_S, Command, serving, started, until
from kit.scripts import alone

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.errors import IncompatibleError, NarrowsError, UsageError
from narrows.protocols.wire import unpack
from narrows.worker.group import group_link
from narrows.worker.group.group import GroupEndedError, _others
from narrows.worker.group.group_link import EVENTS, GroupMemberLink, owner, receive_event, send_event
from narrows.worker.group.group_liveness import GroupLiveness
from narrows.worker.model.fsdp_slices import FsdpSlices
from narrows.worker.runtime.member_link import LinkEvents

GROUPED = """
import hashlib, os, sys, time, torch
from narrows.worker import DistributedOptimizer, clock, local_rank, rank, record, world_size

torch.manual_seed(os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
print(f"begins {rank()} {world_size()} {local_rank()} {os.getpid()} {clock()}\\n", end="", flush=True)
generator = torch.Generator().manual_seed(0)
while not os.path.exists(sys.argv[1]) or clock() % 5 or clock() < 20:
    x = torch.randn(12, 8, generator=generator)[rank() :: world_size()]
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    optimizer.step()
    record(loss=loss.item())
    time.sleep(0.01)
optimizer.finish()
with optimizer.shared():
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"ends {rank()} {hashlib.sha256(weights).hexdigest()}\\n", end="", flush=True)
"""


def lines(command: Command, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in command.out.splitlines() if line.startswith(word)]


def test_a_group_of_which_one_dies_leaves_and_comes_back_and_the_other_worker_goes_on(tmp_path: Path) -> None:
    path, stop, record = (tmp_path / name for name in ("script.py", "stop", "run.jsonl"))
    path.write_text(GROUPED)
    flags = "--sync ssp --staleness 2 --compress topk:0.2+int8 --workers 2 --shards 2 --lease 20"
    with (
        serving(*flags.split()) as server,
        started("ps-worker", "--server", server.address, str(path), str(stop)) as other,
        started(
            *("ps-worker", "--server", server.address, "-n", "2", "--group", "--restarts", "1"),
            *("--record", str(record), str(path), str(stop)),
        ) as group,
    ):
        until(lambda: len(lines(group, "begins")) == 2 or group.process.poll(), group)
        ranks = {int(own): (int(rank), int(world)) for rank, world, own, *_ in lines(group, "begins")}
        ((single, world, _, _, _),) = until(lambda: lines(other, "begins") or other.process.poll(), other)
        # Each worker has every second row, and each process of the group half of those.
        assert int(world) == 2 and ranks == {own: (1 - int(single) + 2 * own, 4) for own in (0, 1)}
        until(lambda: "clock 2" in group.err or group.process.poll(), "it to train")
        victim = next(int(pid) for _, _, own, pid, _ in lines(group, "begins") if own == "1")
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(lines(group, "begins")) == 4 or group.process.poll(), group, GONE_S)
        stop.touch()
        assert group.wait() == 0 and other.wait() == 0, f"{group}\n{other}\n{server.command}"
        assert server.command.wait() == 0, server.command
        assert "process 1 was ended by signal 9 (SIGKILL); its group is started again (1 of 1)\n" in group.err
        assert "\n1 of 1 workers done in " in group.err and "Traceback" not in group.err, group
        joined = re.findall(r"worker (\d+) \(.*\) joined at clock (\d+); (\d) live", server.command.out)
        assert [int(live) for *_, live in joined] == [1, 2, 2] and int(joined[2][1]) > 0, (
            "it has left before it came back"
        )
        begun = [int(at) for *_, at in lines(group, "begins")[2:]]
        assert begun[0] == begun[1] > 0, "both at the run's clock"
        assert len({digest for _, digest in lines(group, "ends")}) == 1 and len(lines(group, "ends")) == 2
        events = [json.loads(line) for line in record.read_text().splitlines()]
        assert {event["local_rank"] for event in events if event["event"] == "step"} == {0}, "one worker is recorded"
        done = events[-1]
        assert done["exit_codes"] == [0] and 0 < done["bytes_up"] < done["raw_bytes_up"]


FAULTY = """
import os, time, torch
from narrows.worker import DistributedOptimizer
from narrows.worker.group import group_liveness

model = torch.nn.Linear(4, 4)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
group_liveness.TOLD_S = 0.5
for step in range(4):
    if step == 3 and os.environ["LOCAL_RANK"] == "1":
        time.sleep(2)
        raise ValueError("of the script")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_a_rank_that_hangs_is_named_and_one_that_raises_is_blamed(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(FAULTY)
    with started("ps-worker", "-n", "2", "--group", str(path)) as command:
        assert command.wait() == 1, command
        told = command.err
    assert "process 1 has not come to where this group meets for 0.5 s; the others wait\n" in told
    assert "ValueError: of the script" in told and "process 1 failed with exit code 1; its group ends\n" in told
    assert "process 0 failed" not in told, "it ended because process 1 did"


def test_those_that_wait_name_those_that_do_not() -> None:
    memory = GroupLiveness.make(4)
    zero, one, two, three = (GroupLiveness(memory, rank) for rank in range(4))
    os.unlink(memory)
    for each in (one, two):
        each.come()
    assert one.missing().startswith("processes 0, 3 have not come")
    assert not two.missing(), "one of them says it"
    zero.wait()
    assert one.missing().startswith("process 3 has not come"), "a server is what the first one waits for"
    zero.come()
    assert zero.missing() and not one.missing()
    three.come()
    assert not any(each.missing() for each in (zero, one, two, three))


def test_what_torch_cannot_do_is_not_only_that_a_rank_has_ended() -> None:
    with pytest.raises(GroupEndedError, match=r"or a collective operation failed \(NCCL error, .* usage\)$"), _others():
        raise RuntimeError("NCCL error, invalid usage\nException raised from here\nframe 0")
    error = "NCCL error, invalid usage\nDuplicate GPU detected: rank 0 and 1\nException raised from here\nframe 0"
    told = r"^NCCL refuses two .* on one GPU \(NCCL .* rank 0 and 1\): give each its own, or leave .* with gloo$"
    with pytest.raises(GroupEndedError, match=told), _others():
        raise RuntimeError(error)
    with pytest.raises(torch.OutOfMemoryError), _others():
        raise torch.OutOfMemoryError("of this GPU")


# The session of the first rank, for all.

STATE = m.State(3, 7, 0, 0, 2, 8, 12, True, False, 5, 5, 5, ((4, 0.5),), 0, 1, b"abcdefghijklmnop")
MOVE: dict[str, Any] = {
    "worker": 3,
    "epoch": 9,
    "clock": 4,
    "ranges": ((0, 5), (5, 9)),
    "ports": (1, 2),
    "hosts": ("", "there"),
    "settings": b"of the run",
}
SAID = [
    e.MemberStarted(3, 7, 4, ((0, 5), (5, 9)), b"buffers", True),
    e.MemberResharded(**MOVE),
    e.PushesPaused(6),
    e.BuffersRequested(),
    e.BuffersArrived(b"buffers"),
    e.RangeArrived(3, 7, False),
    e.AgreementArrived(3, 0.5),
    e.ServerStops(),
    e.MemberLeft(),
    e.LinkMeasured(1, 2, 3, 4, 5),
    e.MemberFailed(5, "why"),
    e.GiveWeights(1),
    e.StatePart(1, STATE),
    e.StateArrived(1, (STATE, STATE)),
    e.MasterArrived(0, 4, (STATE,)),
    e.PushSettled(1, 4),
    e.MomentsArrived(1, 3, 4, b"moments"),
]


@pytest.mark.parametrize("event", SAID, ids=lambda event: type(event).__name__)
def test_a_rank_hears_each_event_as_it_was(event: Any) -> None:
    ours, theirs = Pipe()
    send_event(ours, event)
    assert receive_event(theirs) == event


def test_every_event_that_a_rank_can_hear_is_tried_above() -> None:
    assert {type(event) for event in SAID} == set(EVENTS)


def test_shards_are_shared_out_evenly_and_in_order() -> None:
    for shards in range(1, 9):
        for ranks in range(1, 9):
            owners = [owner(shard, shards, ranks) for shard in range(shards)]
            counts = [owners.count(rank) for rank in range(ranks)]
            assert owners == sorted(owners) and counts[0] == max(counts) and max(counts) - min(counts) <= 1


class Ranks:
    """A hub without a server, and its two other ranks."""

    def __init__(self) -> None:
        self.said: list[tuple[int, list[m.Message]]] = []
        self.hub = object.__new__(group_link.GroupLink)
        LinkEvents.__init__(self.hub)
        self.hub.send = lambda shard, messages: self.said.append((shard, list(messages)))  # type: ignore[method-assign]
        place: Any = unpack(self.hub.open(self))  # type: ignore[arg-type]
        dialling = [threading.Thread(target=self._dial, args=(place, rank)) for rank in (2, 1)]
        self.ranks: dict[int, GroupMemberLink] = {}
        for thread in dialling:
            thread.start()
        self.hub.admit(self)  # type: ignore[arg-type]
        for thread in dialling:
            thread.join()

    size = 3

    def _dial(self, place: Any, rank: int) -> None:
        self.ranks[rank] = GroupMemberLink(place[0], place[1], rank)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_events_of_a_shard_go_to_its_rank_and_those_of_the_run_to_all_in_one_order(ranks: Ranks) -> None:
    ranks.hub._deliver(
        e.MemberResharded(**MOVE | {"ranges": ((0, 1), (1, 2), (2, 3)), "ports": (1, 2, 3), "hosts": ()})
    )
    for shard in range(3):
        ranks.hub._deliver(e.PushSettled(shard, 1))
    ranks.hub._deliver(e.PushesPaused(4))
    for rank, link in ((0, ranks.hub), (1, ranks.ranks[1]), (2, ranks.ranks[2])):
        heard = [link.take(GONE_S) for _ in range(3)]
        assert isinstance(heard[0], e.MemberResharded) and heard[1:] == [e.PushSettled(rank, 1), e.PushesPaused(4)]


def test_a_rank_speaks_through_the_first(ranks: Ranks) -> None:
    follow = m.Follow(3, 7, 4, 5, 1)
    push = m.Push(3, 7, 4, 0, 1, 8, 12, 2, b"", 1, memoryview(b"abcdefghijklmnop"))
    ranks.ranks[2].send(2, [push, follow])
    until(lambda: ranks.said, "it to be said")
    ((shard, messages),) = ranks.said
    assert shard == 2 and messages == [push, follow]


def test_what_ends_the_session_ends_it_for_all(ranks: Ranks) -> None:
    ranks.hub._fail(IncompatibleError("another model"))
    for rank in (1, 2):
        with pytest.raises(IncompatibleError, match="another model"):
            ranks.ranks[rank].take(GONE_S)


def test_a_rank_may_hang_up_in_the_midst_of_what_it_hears(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    link, gone, found = ranks.ranks[1], threading.Event(), list[Any]()
    connection: Any = link._hub
    receive = connection._recv

    def at_leisure(size: int) -> Any:
        gone.wait(GONE_S)
        return receive(size)

    monkeypatch.setattr(threading, "excepthook", found.append)
    connection._recv = at_leisure  # after the length of the event's first frame
    ranks.hub._deliver(e.PushesPaused(4))
    link.close()
    gone.set()
    ended = until(lambda: link._error or found, "the thread to end")
    assert isinstance(ended, GroupEndedError), found


@pytest.mark.parametrize("politely", [True, False])
def test_a_rank_that_is_gone_without_a_word_ends_its_group(politely: bool, ranks: Ranks) -> None:
    if politely:
        ranks.ranks[1].leave(7)
    ranks.ranks[1].close()
    if politely:
        assert ranks.hub.take(0.2) is None
        return
    with pytest.raises(GroupEndedError, match="process 1 of this group has ended"):
        ranks.hub.take(GONE_S)


def test_a_first_rank_that_is_gone_ends_its_group(ranks: Ranks) -> None:
    for connection in ranks.hub.ranks:
        group_link._hang_up(connection)
    with pytest.raises(GroupEndedError, match="the first process of this group has ended"):
        ranks.ranks[2].take(GONE_S)


def test_who_does_not_know_the_key_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_link, "LIMIT_S", 0.5)
    leads = object.__new__(group_link.GroupLink)
    LinkEvents.__init__(leads)
    two: Any = type("Two", (), {"size": 2})()
    place: Any = unpack(leads.open(two))
    assert os.stat(leads.folder).st_mode & 0o077 == 0
    refused: list[BaseException] = []

    def dial() -> None:
        try:
            GroupMemberLink(place[0], b"guessed", 1)
        except Exception as error:
            refused.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    with pytest.raises(NarrowsError, match="did not dial within 0 s: 1"):
        leads.admit(two)
    thread.join(GONE_S)
    assert refused and not os.path.exists(leads.folder)


SHARDED = """
import sys, torch
from torch import nn
from narrows.worker import DistributedOptimizer, rank, world_size

torch.manual_seed(3)
layer = nn.TransformerEncoderLayer(16, 2, 33, 0.0, batch_first=True)  # 33: the parts of the two processes differ in size
net = nn.Sequential(nn.Embedding(31, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 31))
if sys.argv[1] == "sharded":
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    for each in (*net[1].layers, net):
        fully_shard(each)
optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.003), net, max_grad_norm=0.5)
generator = torch.Generator().manual_seed(0)


def loss_of(x):
    return nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1).clone(), x[:, 1:].flatten())


for step in range(20):
    x = torch.randint(0, 31, (8, 12), generator=generator)[rank() :: world_size()]
    optimizer.zero_grad()
    loss_of(x).backward()
    optimizer.step()
    if step == 9:
        with optimizer.shared(), torch.no_grad():  # a forward without a backward: what it has gathered is not trained on
            loss_of(x)
optimizer.finish()
x = torch.randint(0, 31, (8, 12), generator=generator)
with optimizer.shared(), torch.no_grad():
    print(f"ends {rank()} {loss_of(x).item()}\\n", end="", flush=True)
if sys.argv[1] == "sharded":
    torch.distributed.destroy_process_group()  # else a thread of gloo's may end the process with SIGABRT
"""


def test_torchrun_with_a_model_that_fsdp_has_sharded_trains_as_one_process_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script has made its process group, so it is one worker."""
    path = tmp_path / "script.py"
    path.write_text(SHARDED)
    monkeypatch.setattr(sys, "argv", [str(path), "whole"])
    with alone():
        exec(compile(SHARDED, str(path), "exec"), {"__name__": "__main__"})
    by_itself = float(capfd.readouterr().out.split()[2])
    with serving("--sync", "bsp", "--push", "update", "--workers", "1", "--shards", "2") as server:
        words = ("torchrun", "--standalone", "--nproc-per-node", "2", str(path), "sharded")
        with started(*words, env={"NARROWS_SERVER": server.address}) as command:
            assert command.wait() == 0, f"{command}\n{server.command}"
            found = {rank: float(loss) for rank, loss in lines(command, "ends")}
        assert server.command.wait() == 0, server.command
        assert server.command.out.count(" joined at clock 0; 1 live") == 1
    assert found["0"] == found["1"] and abs(found["0"] - by_itself) < 1e-5 * by_itself


LIVES = """
import os, signal, torch
from narrows.worker import DistributedOptimizer, clock, rank

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model)
while clock() < 30:
    if life == "0" and rank() == 1 and clock() == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
optimizer.finish()
print(f"ends {life} {rank()} {clock()}\\n", end="", flush=True)
"""


@pytest.mark.timeout(240)  # four interpreters import torch
def test_torchrun_brings_a_group_back_of_which_one_dies(tmp_path: Path) -> None:
    """It keeps what the processes have told each other in the life before."""
    path = tmp_path / "script.py"
    path.write_text(LIVES)
    with serving("--workers", "1", "--shards", "2") as server:
        words = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", str(path))
        env = {"NARROWS_SERVER": server.address, "NARROWS_GROUP": "1"}
        with started(*words, env=env) as command:
            assert command.wait(3 * LIMIT_S) == 0, f"{command}\n{server.command}"
            assert sorted(lines(command, "ends")) == [["1", "0", "30"], ["1", "1", "30"]], command
        assert server.command.wait() == 0, server.command
        assert server.command.out.count("; 1 live") == 2, server.command


def test_the_shards_of_a_sharded_model_are_each_of_one_process() -> None:
    part = object.__new__(FsdpSlices)
    two: Any = type("Two", (), {"size": 2, "rank": 1})()
    part.group = two
    assert part.own([(0, 2), (2, 4), (4, 6), (6, 8)]) == range(2, 4)
    with pytest.raises(UsageError, match=r"this run has 3 shards, and FSDP shards .* ps-serve --shards 2"):
        part.own([(0, 3), (3, 6), (6, 8)])
