"""Where a shard is: a port of its own, or behind the one port of its server or of the machine that joined."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from narrows.protocols.addresses import (
    are_addresses,
    by_proxy,
    front,
    is_address,
    parted,
    shard_address,
)
from narrows.protocols.runtime.network.hosts import reached
from narrows.worker.runtime.member_link import MemberLink

KEY = "a" * 64


@pytest.mark.parametrize(("hosts", "ports", "valid", "dialled"), [
    ((), (5, 6), True, ["tcp://s:5", "tcp://s:6"]),
    (("", "g"), (5, 6), True, ["tcp://s:5", "tcp://g:6"]),
    ((), (0, 0), True, ["tcp://s:80", "socks5://s:80/shard-1"]),
    (("", "g"), (0, 6), True, ["tcp://s:80", "tcp://g:6"]),  # a machine has joined a server behind one port
    (("", "g:81"), (0, 0), True, ["tcp://s:80", "socks5://g:81/shard-1"]),  # and has one port too
    (("", "g:81"), (5, 0), True, ["tcp://s:5", "socks5://g:81/shard-1"]),
    ((), (5, 0), False, []),
    (("", ""), (0, 6), False, []),
    (("", "g"), (0, 0), False, []),
    (("", "g:81"), (5, 6), False, []),
    (("", "g:x"), (5, 0), False, []),
    (("", "g:0"), (5, 0), False, []),
    (("", "a b:81"), (5, 0), False, []),
    (("",), (0, 0), False, []),
    ((), (70_000, 0), False, []),
    ((), (-1, -1), False, []),
    ((), (), True, []),
])  # fmt: skip
def test_hosts_and_ports_of_a_peer(hosts: Sequence[str], ports: Sequence[int], valid: bool, dialled: list[str]) -> None:
    assert are_addresses(hosts, ports) == valid
    link = cast(MemberLink, SimpleNamespace(address="tcp://s:80", host="s", port=80))
    for shard, where in enumerate(dialled):
        host = hosts[shard] if hosts else ""
        assert MemberLink._endpoint(link, shard, ports[shard], host) == where


def test_a_shard_behind_one_port_has_an_address() -> None:
    assert shard_address("tcp://h:5", 7, 1) == "tcp://h:7" and shard_address("tcp://h:5", 0, 0) == "tcp://h:5"
    address = shard_address("tcp://[::1]:5", 0, 2)
    assert by_proxy(address) == ("[::1]:5", "shard-2", "") and by_proxy("tcp://h:5") is None
    for key in ("", KEY):
        keyed = f"{address}/{key}" if key else address
        assert parted(keyed) == (address, key) and front(keyed) == "tcp://[::1]:5"
        assert is_address(front(keyed)) and not is_address(keyed), "a standby and a worker have a port of their own"
    for bad in (
        "socks5://h:5",
        "socks5://h:5/x",
        "socks5://h:5/shard-1/zz",
        "socks5:///shard-1",
        "socks5://*:5/shard-1",
    ):
        assert not is_address(front(bad)), bad
    assert reached("tcp://0.0.0.0:1", "socks5://127.0.0.1:9/shard-1") == "127.0.0.1"
