"""Mailboxes for tests: a server's and a member's, over a folder or over moto's server of S3."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.mailbox import outbox
from narrows.protocols.runtime.mailbox.mailbox import Mailbox
from narrows.protocols.runtime.mailbox.stores import MeteredStore, store_of
from narrows.protocols.runtime.network.curve_auth import KeyPair, new_pair
from narrows.protocols.runtime.network.sockets import Peer, Port

LIMIT_S = 10.0
BUCKET = "narrows-test"
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
SERVER, MEMBER, STRANGER = new_pair(), new_pair(), new_pair()
NAME = b"member-1"


@contextmanager
def moto_server() -> Iterator[str]:
    """A server of S3 on a free port of loopback, with the bucket BUCKET. Returns its URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        boto3.client("s3", endpoint_url=url, **boto_keys()).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        server.stop()


def boto_keys() -> dict[str, str]:
    """The keywords of a boto3 client for `S3_ENVIRONMENT`."""
    return {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


def of_shard(address: str, shard: int = 0, epoch: str = "", **more: Any) -> Mailbox:
    """The mailbox of a shard that admits MEMBER. `epoch`: of its process; "": a new one."""
    store = more.pop("store", None) or MeteredStore(store_of(address))
    with pytest.MonkeyPatch.context() as patch:
        if epoch:
            patch.setattr(outbox, "new_epoch", lambda: epoch)
        return Mailbox(address, store, SERVER, shard=shard, admits=lambda public: public == MEMBER.public, **more)


def of_member(address: str, own: KeyPair = MEMBER, knows: str = "", **more: Any) -> Mailbox:
    """The mailbox of a member. `knows`: the epoch of shard 0, which need not be there then."""
    store = more.pop("store", None) or MeteredStore(store_of(address))
    made = Mailbox(address, store, own, server=SERVER.public, name=NAME, **more)
    if knows:
        with made.outbox.changed:
            assert made.outbox.peer(address) is not None
        made.outbox.heard("shard-0", knows)
    return made


def taken(port: Port, count: int = 1, limit_s: float = LIMIT_S) -> list[tuple[Peer, list[bytes]]]:
    """Return this many messages of a port."""
    found, deadline = list[tuple[Peer, list[bytes]]](), time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += [(peer, plain(frames)) for peer, frames in port.receive(20)]
    return found


def nothing(port: Port, for_s: float = 0.3) -> bool:
    """True if no message comes in this time."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        for message in port.receive(20):
            raise AssertionError(message)
    return True


def plain(frames: list[Buffer]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def soon(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until this holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
