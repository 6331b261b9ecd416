"""A mailbox: messages come whole, in order and once; what else lies in it costs a count; windows, lives, lost stores."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kit.mailboxes import (
    BUCKET,
    MEMBER,
    NAME,
    S3_ENVIRONMENT,
    SERVER,
    STRANGER,
    moto_server,
    nothing,
    of_member,
    of_shard,
    soon,
    taken,
)

from narrows.protocols.addresses import behind, is_mailbox, parse_mailbox
from narrows.protocols.errors import AuthenticationError, ServerLostError, UnreachableError, UsageError
from narrows.protocols.runtime.mailbox import inbox, outbox, requests, sealing
from narrows.protocols.runtime.mailbox import mailbox as module
from narrows.protocols.runtime.mailbox.inbox import PollPace, claimed
from narrows.protocols.runtime.mailbox.outbox import MailboxPeer
from narrows.protocols.runtime.mailbox.ports import JoinedPorts
from narrows.protocols.runtime.mailbox.sealing import (
    OBJECT_BYTES,
    ObjectHeader,
    Sealer,
    box_of,
    new_epoch,
    of_routing_id,
    packed_message,
)
from narrows.protocols.runtime.mailbox.stores import MeteredStore, cleared, opened, store_of
from narrows.protocols.runtime.network.curve_auth import DiallerId, KeyPair
from narrows.protocols.runtime.network.sockets import FULL, NOBODY, NOWHERE, SENT, Sockets

EPOCH = new_epoch()  # of a shard that is not there yet
TEXT = b"encoder.layers.0.weight"  # what the owner of a store must not read


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_POLL_S", (0.02, 0.1))
    monkeypatch.setattr(module, "LINGER_S", 2.0)


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of a process that dials the bucket. Returns its address."""
    for name, value in (S3_ENVIRONMENT | {"AWS_ENDPOINT_URL": s3_url}).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/run-{os.urandom(4).hex()}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run"


@pytest.fixture(params=["folder", "bucket"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def content(root: str) -> dict[str, bytes]:
    """All objects of a folder, by name."""
    store = store_of(root)
    return {name: store.get(name) for name in store.list("")}


# Messages.


def test_messages_go_both_ways_whole_and_in_order(address: str) -> None:
    with closing(of_shard(address)) as shard, closing(of_member(address)) as member:
        sent = [[b"push %d" % number, bytes([number]) * 1000] for number in range(20)]
        for frames in sent:
            assert member.send(address, frames) is SENT
        found = taken(shard, 20)
        assert [frames for _, frames in found] == sent
        peer = found[0][0]
        assert isinstance(peer, DiallerId) and peer.key == MEMBER.public and peer.startswith(NAME)
        assert of_routing_id(peer) == (MEMBER.public, member.outbox.epoch)
        assert shard.send(peer, [b"ack"]) is SENT
        assert taken(member) == [(address, [b"ack"])]


def test_what_was_read_is_deleted_and_nothing_stays_behind(address: str) -> None:
    store = store_of(address)
    with closing(of_shard(address)) as shard, closing(of_member(address)) as member:
        member.send(address, [b"a"])
        shard.send(taken(shard)[0][0], [b"b"])
        taken(member)
        [*shard.receive(0)], [*member.receive(0)]  # the iterator was asked again: all is handled
        soon(lambda: not store.list(""))


def test_each_shard_has_a_box(folder: str) -> None:
    with (
        closing(of_shard(folder)) as first,
        closing(of_shard(folder, 1)) as second,
        closing(of_member(folder)) as member,
    ):
        member.send(folder, [b"to 0"])
        member.send(behind(folder, 1), [b"to 1"])
        assert taken(first)[0][1] == [b"to 0"]
        (peer, frames), *_ = taken(second)
        assert frames == [b"to 1"]
        second.send(peer, [b"from 1"])
        assert taken(member) == [(f"{folder}/shard-1", [b"from 1"])]
        assert member.send("tcp://127.0.0.1:5", [b"x"]) is NOWHERE
        assert first.send(b"a socket's peer", [b"x"]) is NOBODY


def test_a_long_message_is_several_objects(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "OBJECT_BYTES", 1000)
    long = os.urandom(10_500)
    with closing(of_shard(folder)) as shard, closing(of_member(folder)) as member:
        member.send(folder, [b"before"])
        member.send(folder, [b"head", long])
        member.send(folder, [b"after"])
        assert [frames for _, frames in taken(shard, 3)] == [[b"before"], [b"head", long], [b"after"]]


def test_a_message_one_object_of_which_is_lost_does_not_come_and_the_next_does(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "OBJECT_BYTES", 1000)
    with closing(of_member(folder, knows=EPOCH)) as member:
        member.send(folder, [b"long", os.urandom(5000)])
        soon(lambda: len(content(folder)) == 6)
        member.send(folder, [b"next"])
        soon(lambda: len(content(folder)) == 7)
        lost = sorted(content(folder))[0]  # the first part
        Path(folder.removeprefix("file://"), lost).unlink()
        with closing(of_shard(folder, epoch=EPOCH)) as shard:
            assert [frames for _, frames in taken(shard)] == [[b"next"]]
            assert nothing(shard, 0.1)
            soon(lambda: not content(folder))


def test_many_short_messages_are_few_objects(folder: str) -> None:
    with closing(of_shard(folder)) as shard, closing(of_member(folder)) as member:
        for number in range(200):
            member.send(folder, [b"%d" % number], control=True)
        taken(shard, 200)
        assert member.store.counts.requests["PUT"] < 20


def test_a_heartbeat_overtakes_a_large_push_that_waits(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "GATHER_S", 0.2)
    with closing(of_shard(folder)) as shard, closing(of_member(folder)) as member:
        member.send(folder, [b"push", bytes(OBJECT_BYTES)])
        member.send(folder, [b"beat"], control=True)
        assert [frames[0] for _, frames in taken(shard, 2)] == [b"beat", b"push"]


# What the owner of the store sees, and can do.


def test_nothing_can_be_read_in_the_store(address: str) -> None:
    store = store_of(address)
    with closing(of_member(address, knows=EPOCH)) as member:
        member.send(address, [TEXT, TEXT * 100])
        soon(lambda: store.list("shard-0/"))
        for name in store.list(""):
            assert TEXT not in store.get(name) and TEXT not in name.encode() and NAME not in store.get(name)


def forged(
    receiver: str = "shard-0",
    sender: KeyPair = MEMBER,
    header: ObjectHeader | None = None,
    body: bytes | None = None,
    to: str = SERVER.public,
) -> tuple[str, bytes]:
    """An object of a member: its name in the box, and its content."""
    header = header or ObjectHeader(receiver, sender.public, new_epoch(), 0, name=NAME)
    return header.object, Sealer(sender).seal(to, header, packed_message([b"forged"]) if body is None else body)


GOOD = ObjectHeader("shard-0", MEMBER.public, new_epoch(), 7, EPOCH, NAME)
HOSTILE = {
    "no name of an object": ("hello", b"x"),
    "path": ("a b", b"x"),
    "not sealed": (GOOD.object, b"garbage"),
    "empty body": forged(header=GOOD, body=b"\x07\0\0\0"),
    "a stranger": forged(sender=STRANGER),
    "a stranger under the name of a member": (GOOD.object, forged(sender=STRANGER, header=GOOD)[1]),
    "for another shard": (GOOD.object, forged(header=ObjectHeader("shard-1", GOOD.sender, GOOD.epoch, 7))[1]),
    "another sequence": (GOOD.object, forged(header=ObjectHeader("shard-0", GOOD.sender, GOOD.epoch, 8))[1]),
    "another epoch": (GOOD.object, forged(header=ObjectHeader("shard-0", GOOD.sender, new_epoch(), 7))[1]),
    "from a shard": (f"shard-1-{new_epoch()}-{0:012d}", b"x" * 100),
    "frames beyond the end": forged(header=GOOD, body=packed_message([b"x" * 100])[:-1]),
    "too many frames": forged(header=GOOD, body=packed_message([b"x"] * 9)),
    "no claim": (f"serves-{'f' * 20}", b"x" * 100),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_object_is_counted_and_deleted_and_costs_nothing_else(folder: str, what: str) -> None:
    told = list[str]()
    store = store_of(folder)
    with closing(of_shard(folder, epoch=EPOCH, refused=told.append)) as shard, closing(of_member(folder)) as member:
        name, sealed = HOSTILE[what]
        store.put(f"shard-0/{name}", sealed)
        soon(lambda: sum(shard.inbox.kinds.values()) == 1)
        member.send(folder, [b"good"])
        assert taken(shard)[0][1] == [b"good"]
        assert len(told) == 1 and folder in told[0]
        soon(lambda: f"shard-0/{name}" not in store.list(""))


def test_an_object_that_is_too_large_is_deleted_unread(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "OBJECT_BYTES_MAX", 100)
    store = store_of(folder)
    with closing(of_shard(folder)) as shard:
        store.put(f"shard-0/{GOOD.object}", bytes(101))
        soon(lambda: shard.inbox.kinds and not store.list(""))
        assert shard.store.counts.requests.get("GET", 0) == 0


def test_a_replay_an_object_in_another_box_and_one_thrown_back_are_refused(folder: str) -> None:
    store = store_of(folder)
    with closing(of_member(folder, knows=EPOCH)) as member:
        member.send(folder, [b"once"])
        soon(lambda: store.list("shard-0/"))
        ((name, kept),) = content(folder).items()
        with closing(of_shard(folder, epoch=EPOCH)) as shard, closing(of_shard(folder, 1)) as other:
            peer, _ = taken(shard)[0]
            [*shard.receive(0)]
            soon(lambda: not store.list(""))
            store.put(name, kept)  # again
            soon(lambda: shard.inbox.kinds["it was taken before"] == 1)
            store.put(name.replace("shard-0", "shard-1"), kept)  # to another shard, with the same key
            soon(lambda: other.inbox.kinds["it belongs elsewhere, or to another time"] == 1)
            shard.send(peer, [b"answer"])
            taken(member)
            store.put(f"{member.inbox.box}/shard-0-{shard.outbox.epoch}-{9:012d}", kept)  # back: the same pair of keys
            soon(lambda: member.inbox.kinds["it belongs elsewhere, or to another time"] == 1)
            assert nothing(shard, 0.05) and nothing(other, 0.05) and nothing(member, 0.05)


def test_objects_in_another_order_come_in_that_of_the_sender_or_not_at_all(folder: str) -> None:
    store, kept = store_of(folder), list[tuple[str, bytes]]()
    with closing(of_member(folder, knows=EPOCH)) as member:
        for number in range(3):
            member.send(folder, [b"%d" % number])
            soon(lambda: len(content(folder)) > number)  # noqa: B023 - called at once
        kept = sorted(content(folder).items())
        for name, _ in kept:
            store.delete(name)
        with closing(of_shard(folder, epoch=EPOCH)) as shard:
            store.put(*kept[1])
            assert taken(shard)[0][1] == [b"1"]
            store.put(*kept[0])  # held back until a later one was taken
            soon(lambda: shard.inbox.kinds["it was taken before"] == 1)
            store.put(*kept[2])
            assert taken(shard)[0][1] == [b"2"]


def test_what_was_for_one_life_of_a_shard_cannot_be_put_back_to_the_next(folder: str) -> None:
    """Nor can the first objects of a member, from before it knew the shard."""
    store, kept = store_of(folder), dict[str, bytes]()
    with closing(of_member(folder)) as member:
        member.send(folder, [b"hello"])
        soon(lambda: content(folder))
        kept |= content(folder)  # it asks
        with closing(of_shard(folder)) as shard:
            taken(shard)
        member.send(folder, [b"more"])
        soon(lambda: content(folder))
        kept |= content(folder)
    with closing(of_shard(folder)) as again:
        for name, each in kept.items():
            store.put(name, each)
        assert nothing(again, 0.3) and len(kept) >= 2
        soon(lambda: not [name for name in content(folder) if name.startswith("shard-0/")])


def test_a_member_takes_objects_of_its_shards_alone(folder: str) -> None:
    store = store_of(folder)
    with closing(of_shard(folder)) as shard, closing(of_member(folder)) as member:
        member.send(folder, [b"x"])
        header = ObjectHeader(member.inbox.box, MEMBER.public, new_epoch(), 0)
        store.put(f"{member.inbox.box}/{header.object}", Sealer(MEMBER).seal(MEMBER.public, header, b""))
        soon(lambda: sum(member.inbox.kinds.values()) == 1)
        unknown = ObjectHeader(
            member.inbox.box, "shard-5", new_epoch(), 0
        )  # of the server, from a shard never written to
        store.put(f"{member.inbox.box}/{unknown.object}", Sealer(SERVER).seal(MEMBER.public, unknown, b""))
        soon(lambda: sum(member.inbox.kinds.values()) == 2)
        shard.send(taken(shard)[0][0], [b"y"])
        assert taken(member)[0][1] == [b"y"]


# Lives.


def test_a_shard_that_was_started_again_refuses_what_was_for_its_life_before(folder: str) -> None:
    linked = list[str]()
    with closing(of_member(folder, linked=linked.append)) as member:
        with closing(of_shard(folder)) as shard:
            member.send(folder, [b"hello"])
            peer, _ = taken(shard)[0]
            shard.send(peer, [b"welcome"])
            taken(member)
        member.send(folder, [b"to the first life"])
        soon(lambda: content(folder))
        with closing(of_shard(folder)) as again:
            soon(lambda: [*member.receive(10)] or linked == [folder])  # the empty answer tells of the new life
            member.send(folder, [b"to the second"])
            assert taken(again)[0][1] == [b"to the second"]
            assert again.send(peer, [b"known by its routing id alone"]) is SENT
            assert taken(member)[0][1] == [b"known by its routing id alone"]


def test_a_shard_that_goes_on_writes_to_its_members_first(folder: str) -> None:
    """As after a replay of its journal, which has their routing ids."""
    linked = list[str]()
    with closing(of_member(folder, linked=linked.append)) as member:
        with closing(of_shard(folder)) as shard:
            member.send(folder, [b"hello"])
            peer, _ = taken(shard)[0]
            shard.send(peer, [b"welcome"])
            taken(member)
        with closing(of_shard(folder)) as again:
            assert isinstance(peer, bytes)
            again.send(bytes(peer), [b"again"])
            assert taken(member)[0][1] == [b"again"] and linked == [folder]


def test_a_clock_that_was_set_back_costs_one_more_life(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(of_member(folder)) as member:
        with closing(of_shard(folder)) as shard:
            member.send(folder, [b"hello"])
            shard.send(taken(shard)[0][0], [b"welcome"])
            taken(member)
            first = shard.outbox.epoch
        monkeypatch.setattr(time, "time_ns", lambda: 10**15)
        with closing(of_shard(folder)) as again:
            assert again.outbox.epoch < first
            member.send(folder, [b"x"])
            soon(lambda: again.outbox.epoch > first)
            soon(lambda: [*member.receive(10)] or member.outbox.peers["shard-0"].epoch == again.outbox.epoch)
            member.send(folder, [b"y"])
            assert taken(again)[0][1] == [b"y"]


def test_the_latest_server_serves_and_the_one_before_ends(folder: str) -> None:
    store = MeteredStore(store_of(folder))
    first = claimed(store, SERVER)
    with closing(of_shard(folder, claim=first)) as shard:
        assert nothing(shard, 0.1)
        second = claimed(store, SERVER)
        assert second > first
        with pytest.raises(ServerLostError, match="another ps-serve"):
            nothing(shard, 5)
    assert [*store.list("")] == [f"shard-0/serves-{second}"]


def test_a_forged_claim_ends_nobody(folder: str) -> None:
    store = MeteredStore(store_of(folder))
    mine = claimed(store, SERVER)
    with closing(of_shard(folder, claim=mine)) as shard:
        later = claimed(store, STRANGER)
        soon(lambda: sum(shard.inbox.kinds.values()) == 1)
        assert nothing(shard, 0.1) and later > mine


# Bounds.


def test_the_window_opens_as_the_receiver_deletes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FLYING_BYTES_MAX", 10_000)
    with closing(of_member(folder, knows=EPOCH)) as member:
        receipts = [member.send(folder, [bytes(3000)]) for _ in range(6)]
        assert receipts[:3] == [SENT] * 3 and FULL in receipts
        with closing(of_shard(folder, epoch=EPOCH)) as shard:
            taken(shard, receipts.count(SENT))
            [*shard.receive(0)]
            soon(lambda: not content(folder))
            member.send(folder, [b""], control=True)
            soon(lambda: member.send(folder, [bytes(3000)]) is SENT)


def test_no_more_objects_lie_in_a_box_than_the_bound(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FLYING_OBJECTS_MAX", 4)
    monkeypatch.setattr(outbox, "GATHER_S", 0.0)
    monkeypatch.setattr(outbox, "OBJECT_BYTES", 10)
    with closing(of_member(folder, knows=EPOCH)) as member:
        for number in range(30):
            member.send(folder, [b"%02d" % number])
        soon(lambda: len(content(folder)) == 4)
        soon(lambda: member.store.counts.requests.get("LIST", 0) > 4)  # it looked again, and again
        assert len(content(folder)) == 4
        with closing(of_shard(folder, epoch=EPOCH)) as shard:
            assert [frames for _, frames in taken(shard, 30)] == [[b"%02d" % number] for number in range(30)]


def test_messages_that_wait_are_bounded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "QUEUE_MESSAGES_MAX", 3)
    peer = MailboxPeer("x", "box", "")
    for _ in range(3):
        assert peer.fits(10)
        peer.control.append(b"x")
    assert not peer.fits(10)


def test_nothing_more_is_got_while_too_much_is_unread(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "UNREAD_BYTES_MAX", 100)
    with closing(of_shard(folder, epoch=EPOCH)) as shard, closing(of_member(folder, knows=EPOCH)) as member:
        member.send(folder, [bytes(200)])
        soon(lambda: shard.store.counts.requests.get("GET", 0) == 1)
        member.send(folder, [b"next"])
        soon(lambda: member.store.counts.requests.get("PUT", 0) == 2)
        threading.Event().wait(0.2)
        assert shard.store.counts.requests["GET"] == 1
        assert len(taken(shard, 2)) == 2


def test_the_box_of_a_member_that_is_silent_for_long_is_emptied(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(of_shard(folder)) as shard:
        member = of_member(folder)
        member.send(folder, [b"hello"])
        peer, _ = taken(shard)[0]
        member.close()
        shard.send(peer, [b"nobody takes it"])
        soon(lambda: any(name.startswith(MEMBER.public) for name in content(folder)))
        monkeypatch.setattr(outbox, "PEER_SILENT_S", 0.2)
        soon(lambda: not content(folder))
        assert not shard.outbox.peers


def test_an_idle_mailbox_looks_ever_more_rarely() -> None:
    pace, waits = PollPace(0.1, 2.0), list[float]()
    for _ in range(20):
        pace.looked(False)
        waits.append(pace.wait_s)
    assert waits == sorted(waits) and waits[-1] == 2.0 and sum(each < 2.0 for each in waits) < 8
    pace.looked(True)
    assert pace.wait_s == 0.1
    pace.looked(False)
    pace.hurry()
    assert pace.wait_s == 0.1


def test_requests_are_counted_and_none_is_hidden(bucket: str) -> None:
    """By moto's own count of what came."""
    store = opened(bucket)
    before = store.counts.requests
    store.put("shard-0/a", b"1")
    assert store.list("shard-0/") == {"shard-0/a": 1} and store.list("nowhere/") == {}
    assert store.get("shard-0/a") == b"1"
    store.delete("shard-0/a")
    with pytest.raises(FileNotFoundError):
        store.get("shard-0/a")
    after = {kind: count - before[kind] for kind, count in store.counts.requests.items()}
    assert after == {"PUT": 1, "LIST": 2, "GET": 2, "DELETE": 1}
    assert store.counts.bytes_up == 65 and store.counts.bytes_down == 65
    assert "MB up" in store.counts.text() and store.passage_s() > 0


# Stores that fail.


class Flaky:
    """A store whose requests fail while `broken` is set."""

    def __init__(self, address: str) -> None:
        self.inner, self.broken = store_of(address), threading.Event()

    def _check(self) -> None:
        if self.broken.is_set():
            raise OSError("no route to the store")

    def put(self, name: str, content: bytes) -> None:
        self._check()
        self.inner.put(name, content)

    def get(self, name: str) -> bytes:
        self._check()
        return self.inner.get(name)

    def list(self, begins: str) -> dict[str, int]:
        self._check()
        return self.inner.list(begins)

    def delete(self, name: str) -> None:
        self._check()
        self.inner.delete(name)


def test_a_store_that_fails_for_a_while_costs_time_only(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RETRY_S", 0.02)
    flaky = Flaky(folder)
    with closing(of_shard(folder)) as shard, closing(of_member(folder, store=MeteredStore(flaky))) as member:
        flaky.broken.set()
        member.send(folder, [b"x"])
        soon(lambda: member.trouble)
        assert nothing(shard, 0.1) and member.store.counts.failed > 0
        flaky.broken.clear()
        assert taken(shard)[0][1] == [b"x"]
        soon(lambda: not member.trouble)


def test_a_store_that_fails_for_long_is_lost(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RETRY_S", 0.02)
    monkeypatch.setattr(requests, "STORE_LOST_S", 0.2)
    flaky = Flaky(folder)
    with closing(of_member(folder, store=MeteredStore(flaky))) as member:
        flaky.broken.set()
        with pytest.raises(UnreachableError, match="no route to the store") as raised:
            nothing(member, 5)
        assert raised.value.exit_code == 3


def test_a_mailbox_whose_store_hangs_closes_in_time(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.2)
    monkeypatch.setattr(module, "CLOSE_S", 0.4)
    hangs = threading.Event()

    class Hanging(Flaky):
        def _check(self) -> None:
            if self.broken.is_set():
                hangs.wait(20)

    store = Hanging(folder)
    member = of_member(folder, store=MeteredStore(store))
    store.broken.set()
    member.send(folder, [b"x"])
    closer = threading.Thread(target=member.close)
    closer.start()
    closer.join(3)
    assert not closer.is_alive()
    hangs.set()
    store.broken.clear()
    for thread in member.requests.threads:
        thread.join(5)


def test_the_first_request_names_what_is_wrong(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no such bucket"):
        opened("s3://no-such-bucket-here/run", 0)
    with pytest.raises(UsageError, match="there is no such folder"):
        opened(f"file://{tmp_path}/no/such/folder", 0)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AuthenticationError, match="credentials"):
        opened(bucket, 0)
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(UnreachableError, match="did not answer"):
        opened(bucket, 0)


def test_what_is_not_installed_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: object, **kwargs: object) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.filesystem", lacks)
    with pytest.raises(UsageError, match=r"gcsfs.*narrows\[via\]"):
        opened("gs://bucket/run", 0)
    monkeypatch.setitem(sys.modules, "nacl.public", None)
    with pytest.raises(UsageError, match=r"PyNaCl.*narrows\[via\]"):
        of_shard(folder)


def test_a_wrong_credential_is_told_at_once(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()

    class Locked(Flaky):
        def _check(self) -> None:
            raise PermissionError(13, "Access Denied")

    from narrows.protocols.runtime.mailbox import stores

    patch = pytest.MonkeyPatch()
    patch.setattr(stores, "store_of", lambda address: Locked(f"file://{tmp_path}/x"))
    with patch.context(), pytest.raises(AuthenticationError, match="Access Denied") as raised:
        opened(f"file://{tmp_path}/x", 30)
    patch.undo()
    assert raised.value.exit_code == 4


# Leftovers.


def test_a_run_can_be_removed_from_its_store(address: str) -> None:
    store = opened(address)
    for name in ("shard-0/a", "shard-1/b", "c/d", "e"):
        store.put(name, b"x")
    assert cleared(store, keep=("shard-",)) == 2
    assert sorted(store.list("")) == ["shard-0/a", "shard-1/b"]
    assert cleared(store) == 2 and not store.list("")


def test_a_member_that_leaves_empties_its_box(folder: str) -> None:
    with closing(of_shard(folder)) as shard:
        member = of_member(folder)
        member.send(folder, [b"x"])
        peer, _ = taken(shard)[0]
        [*shard.receive(0)]
        soon(lambda: not content(folder))
        shard.send(peer, [b"late"])
        soon(lambda: content(folder) or member.inbox.messages)
        member.close()
        assert not [name for name in content(folder) if name.startswith(member.inbox.box)]


# Joined with sockets.


def test_one_port_of_sockets_and_mailboxes(folder: str) -> None:
    with closing(Sockets()) as other:
        number = other.listen("tcp://127.0.0.1:0")
        sockets = Sockets()
        joined = JoinedPorts(sockets, [of_shard(folder, notify=sockets.wake)])
        with closing(joined), closing(of_member(folder)) as member:
            joined.send(f"tcp://127.0.0.1:{number}", [b"by a socket"])
            assert taken(other)[0][1] == [b"by a socket"]
            member.send(folder, [b"by the mailbox"])
            ((peer, frames),) = taken(joined)
            assert frames == [b"by the mailbox"]
            joined.send(peer, [b"back"])
            assert taken(member)[0][1] == [b"back"]
            joined.hang_up(f"tcp://127.0.0.1:{number}")
            with suppress(StopIteration):
                next(iter(joined.receive(0)))


# Addresses and names.


def test_addresses_of_mailboxes() -> None:
    for good in ("s3://bucket/run", "gs://b.c-d/runs/run_1", "file:///shared/run 10", "s3://b/run/"):
        assert is_mailbox(good) and parse_mailbox("--via", good) == good.rstrip("/")
    for bad in (
        "s3://bucket",
        "s3:///run",
        "file://run",
        "http://x/y",
        "file:///run",
        "tcp://a:1",
        "s3://b/r,s3://b/q",
    ):
        with pytest.raises(UsageError, match="--via"):
            parse_mailbox("--via", bad)
    assert behind("s3://b/run", 0) == "s3://b/run" and behind("s3://b/run", 3) == "s3://b/run/shard-3"
    assert not is_mailbox("tcp://h:1")


def test_epochs_count_upward_and_a_box_has_one_process() -> None:
    first = new_epoch()
    assert sealing.after(first)[:12] > first[:12]
    assert box_of(MEMBER.public, first) != box_of(MEMBER.public, sealing.after(first))
