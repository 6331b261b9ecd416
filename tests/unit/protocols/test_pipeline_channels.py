"""Channels between two stages, over wires that lose what was under way when they break."""

from __future__ import annotations

import random
from collections import deque

import pytest
from kit.seed import SEED

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, MemberFailed
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.pipeline_channels import (
    IN_FLIGHT_MAX,
    START_NS,
    UNTOLD_BYTES,
    UNTOLD_MAX,
    Channels,
    Effect,
    SendOnChannel,
    TensorArrived,
    TensorTaken,
)

LEASE = 10 * NS


class Pair:
    """Two processes, and a wire each way that keeps the order of what is under way."""

    def __init__(self) -> None:
        self.now = 0
        self.ends = [Channels(rank, ["stage 0", "stage 1"], 7, 100 + rank, LEASE, 0) for rank in range(2)]
        self.wires: list[deque[m.Message]] = [deque(), deque()]  # to each
        self.came: list[list[m.PipelineTensor]] = [[], []]
        self.taken = [0, 0]  # of ours, by the other
        self.failed: list[MemberFailed] = []

    def apply(self, end: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendOnChannel(peer, message):
                    self.wires[peer].append(message)
                case TensorArrived(_, tensor):
                    self.came[end].append(tensor)
                case TensorTaken(_, count):
                    self.taken[end] += count
                case MemberFailed():
                    self.failed.append(effect)

    def deliver(self, end: int) -> None:
        if self.wires[end]:
            self.apply(end, self.ends[end].receive(self.wires[end].popleft(), self.now))

    def cut(self, end: int) -> None:
        """The connection to this end is another one."""
        self.wires[end].clear()
        self.apply(1 - end, self.ends[1 - end].linked(end))

    def tick(self, after_ns: int) -> None:
        self.now += after_ns
        for end in range(2):
            self.apply(end, self.ends[end].tick(self.now))

    def settle(self) -> None:
        for _ in range(4):
            self.tick(NS)
            while any(self.wires):
                self.deliver(0)
                self.deliver(1)


@pytest.mark.parametrize("round_", range(20))
def test_each_tensor_comes_once_and_in_order_whatever_breaks(round_: int) -> None:
    chance, pair = random.Random(SEED + round_), Pair()
    sent, asked = [0, 0], [0, 0]
    for _ in range(300):
        end = chance.randrange(2)
        match chance.randrange(10):
            case 0 | 1 | 2:
                pair.apply(end, pair.ends[end].send(1 - end, 5, 0, bytes([sent[end] % 256])))
                sent[end] += 1
            case 3 | 4 | 5 | 6:
                pair.deliver(end)
            case 7 if asked[end] < len(pair.came[end]):
                pair.apply(end, pair.ends[end].took(1 - end, 1))
                asked[end] += 1
            case 8:
                pair.cut(end)
            case 9:
                pair.tick(NS // 2)
    pair.settle()
    for end in range(2):
        while asked[end] < len(pair.came[end]):
            pair.apply(end, pair.ends[end].took(1 - end, 1))
            asked[end] += 1
    pair.settle()
    assert not pair.failed
    for end in range(2):
        assert [tensor.number for tensor in pair.came[end]] == list(range(sent[1 - end])), f"seed {SEED + round_}"
        assert pair.taken[1 - end] == sent[1 - end] and not pair.ends[1 - end].peers[end].kept


def test_what_a_dropped_message_leaves_out_is_asked_for_once() -> None:
    pair = Pair()
    for value in range(3):
        pair.apply(0, pair.ends[0].send(1, 0, 0, bytes([value])))
    pair.wires[1].popleft()  # dropped, and the connection stays
    pair.deliver(1)
    pair.deliver(1)
    assert [b.missed for b in pair.wires[0] if isinstance(b, m.PipelineBeat)] == [0]
    pair.settle()
    assert [bytes(tensor.payload)[0] for tensor in pair.came[1]] == [0, 1, 2]


def test_what_is_taken_is_told_with_others_and_before_it_is_much() -> None:
    """A word for each tensor would cost as many wake-ups as the tensors. Those not told of stay with their sender."""
    pair = Pair()
    for _ in range(2 * UNTOLD_MAX + 1):
        pair.apply(0, pair.ends[0].send(1, 0, 0, b""))
    said = [len(pair.ends[1].took(0, 1)) for _ in range(2 * UNTOLD_MAX)]
    assert said == 2 * [*[0] * (UNTOLD_MAX - 1), 1]
    assert pair.ends[1].took(0, UNTOLD_BYTES) and not pair.ends[1].tell()
    assert not pair.ends[1].took(0, 1) and pair.ends[1].tell() and not pair.ends[1].tell()


def test_what_nobody_takes_is_bounded_at_the_receiver_too() -> None:
    pair = Pair()
    for _ in range(IN_FLIGHT_MAX + 1):
        pair.apply(0, pair.ends[0].send(1, 0, 0, b""))
    for _ in range(IN_FLIGHT_MAX):
        pair.deliver(1)
    with pytest.raises(
        RemoteProtocolError, match="stage 0 sends more than 256 tensors that the script has not received"
    ):
        pair.deliver(1)
    pair.apply(1, pair.ends[1].took(0, 0))
    assert pair.ends[1].receive(pair.ends[0].peers[1].kept[-1], 0) == [TensorArrived(0, pair.ends[0].peers[1].kept[-1])]


def test_who_is_silent_for_a_lease_is_lost_and_no_sooner() -> None:
    pair = Pair()
    pair.settle()
    heard = pair.now
    lonely = pair.ends[0]
    assert not [e for e in lonely.tick(heard + LEASE) if isinstance(e, MemberFailed)]
    (failed,) = [e for e in lonely.tick(heard + LEASE + 1) if isinstance(e, MemberFailed)]
    assert failed.code == 6 and failed.text.startswith("stage 1 was not heard for 10 s")


def test_who_has_left_is_not_waited_for_and_who_failed_ends_the_others() -> None:
    pair = Pair()
    pair.settle()
    pair.apply(1, pair.ends[1].leave(failed=False))
    pair.deliver(0)
    assert not [e for e in pair.ends[0].tick(pair.now + 3 * LEASE) if isinstance(e, (MemberFailed, SendOnChannel))]
    pair.apply(1, pair.ends[1].leave(failed=True))
    pair.deliver(0)
    assert [failed.code for failed in pair.failed] == [6] and "--resume" in pair.failed[0].text


@pytest.mark.parametrize("code", [1, 2, 5, 6])
def test_all_of_a_pipeline_end_with_the_exit_code_of_the_fault_and_resume_is_named_where_it_helps(code: int) -> None:
    pair = Pair()
    pair.settle()
    pair.apply(1, pair.ends[1].leave(True, code))
    pair.deliver(0)
    (failed,) = pair.failed
    assert failed.code == code and ("--resume" in failed.text) is (code == 6)
    assert failed.text.startswith("stage 1 has failed" + (f" with exit code {code}" if code != 6 else ","))


def test_another_life_another_plan_and_who_never_comes() -> None:
    pair = Pair()
    pair.settle()
    again = Channels(1, ["stage 0", "stage 1"], 7, 999, LEASE, 0)
    other = Channels(1, ["stage 0", "stage 1"], 8, 999, LEASE, 0)
    for begun, text in ((again, "stage 1 was started again"), (other, "stage 1 was started with another plan")):
        (beat,) = begun.leave(failed=False)
        assert isinstance(beat, SendOnChannel)
        (failed,) = pair.ends[0].receive(beat.message, 0)
        assert isinstance(failed, MemberFailed) and failed.text.startswith(text)
    (late,) = [e for e in again.tick(START_NS + 1) if isinstance(e, MemberFailed)]
    assert late.code == 3 and "stage 0 did not connect within 600 s" in late.text
    with pytest.raises(RemoteProtocolError, match="Ping is not of a process of this pipeline"):
        again.receive(m.Ping(0, 1), 0)
