"""The text of addresses: tcp://HOST:PORT, its Unix socket, shards behind one port, nodes, mailboxes, stores.

- In a run with keys, peers send each other tcp://HOST:PORT/KEY: the public key of the process there, in 64 hex digits.
- A node that is met through a relay has socks5://HOST:PORT/node-...@NEAR, and the key behind that: the relay's place,
  the node's name, and HOST:PORT of the node itself, where only peers of its own network reach it. Without the first
  HOST:PORT the relay is at the server: each peer reaches it where it reaches the server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from narrows.protocols.errors import UsageError

ANY_HOST = "0.0.0.0"
LOCAL_HOSTS = ("127.0.0.1", "localhost")  # not all of loopback: a test proxy listens on another loopback address
ANY_HOSTS = (ANY_HOST, "*", "[::]")  # hosts that bind to every address of a machine

STORES = {"s3": "s3fs", "gs": "gcsfs"}  # by scheme of an object store: the package that fsspec needs for it


def is_mailbox(address: str) -> bool:
    """True if an address names a mailbox: objects in a bucket or in a shared folder."""
    return address.startswith(MAILBOXES)


def parse_mailbox(flag: str, address: str) -> str:
    """Return the address of a mailbox without a slash at its end.

    Raises:
        UsageError: one sentence that names the flag.
    """
    if not MAILBOX.fullmatch(address):
        raise UsageError(f"{flag} {address}: write it as s3://BUCKET/RUN, gs://BUCKET/RUN or file:///SHARED/FOLDER")
    return address.rstrip("/")


def is_loopback(host: str) -> bool:
    """True if only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """Return a host as an address has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def parse_address(flag: str, address: str, any_port: bool = False) -> tuple[str, int]:
    """Return (host, port) of tcp://host:port.

    Args:
        flag: the flag that the user gave, for the error.
        address: its value.
        any_port: port 0 is allowed.

    Raises:
        UsageError: one sentence that names the flag.
    """
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    fits = re.fullmatch(r"[0-9]{1,5}", port) and (0 if any_port else 1) <= int(port) < 65536
    if not address.startswith("tcp://") or not colon or not HOST.fullmatch(host) or not fits:
        example = "for example tcp://127.0.0.1:5555" if any_port else "as ps-serve printed it"
        raise UsageError(f"{flag} {address}: write it as tcp://HOST:PORT, {example}")
    return host, int(port)


def parse_addresses(flag: str, addresses: str) -> list[str]:
    """Return the addresses of a server and its standbys, which are separated by commas; or the address of its mailbox.

    Raises:
        UsageError: one sentence that names the flag.
    """
    if is_mailbox(addresses):
        return [parse_mailbox(flag, addresses)]
    for address in (parted := addresses.split(",")):
        parse_address(flag, address)
    return parted


HOST = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")
KEYLESS = (
    "what lies in a mailbox is sealed, so that the owner of the store reads nothing: give the file that ps-serve keys add made "
    "with --key"
)
MAILBOXES = ("s3://", "gs://", "file://")
MAILBOX = re.compile(r"(?:(?:s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9._=+-]+)+|file://(?:/[^/,\x00]+){2,})/?")
NODE_HEX = 32  # hex digits of a node's name
NODE = re.compile(rf"node-[0-9a-f]{{{NODE_HEX}}}")
BEHIND = re.compile(rf"socks5://([^/]*:[0-9]+)/(?:(shard-[0-9]+)|({NODE.pattern})@([^/]*:[0-9]+))")
KEYED = re.compile(rf"(tcp://[^/]*|socks5://[^/]*/(?:shard-[0-9]+|{NODE.pattern}@[^/]*))(?:/([0-9a-f]{{64}}))?")
AT_SERVER = "socks5:///"  # begins the address of a node whose relay is at the server


def parted(address: str) -> tuple[str, str]:
    """Return an address that a peer sent without its key, and the key; "" if the address has none."""
    match = KEYED.fullmatch(address)
    return (match[1], match[2] or "") if match else (address, "")


def is_address(address: str) -> bool:
    """True if an address that a peer sent is valid: tcp://host:port, or a node at a relay, with a key or without."""
    places = [bare := parted(address)[0]]
    if (by := by_proxy(bare)) is not None and by[2]:
        places = [f"tcp://{by[0]}", f"tcp://{by[2]}"]
    try:
        return all(parse_address("", place)[0] != "*" for place in places)
    except UsageError:
        return False


def are_addresses(hosts: Sequence[str], ports: Sequence[int]) -> bool:
    """True if hosts and ports that a peer sent are valid.

    No hosts, or "" for one, mean the host of the peer itself. Port 0 means behind one port: with host "" the port of the
    peer itself, else that of the host, which is HOST:PORT then. All shards of the peer's own are behind its port, or none.
    """
    if len(hosts) not in (0, len(ports)):
        return False
    pairs = [*zip(hosts or [""] * len(ports), ports, strict=True)]
    if len({port == 0 for host, port in pairs if not host}) > 1:
        return False
    others = [(host or ANY_HOST, port) for host, port in pairs if host or port]
    return all(is_address(f"tcp://{host}:{port}" if port else f"tcp://{host}") for host, port in others)


def shard_name(shard: int) -> str:
    """Return the host name by which CONNECT asks for a shard at the one port of its server."""
    return f"shard-{shard}"


def behind(address: str, shard: int) -> str:
    """Return the address of a shard behind the one port of its server, tcp://host:port.

    A connection that names no shard goes to shard 0. The same holds in a mailbox, whose shards have a box each.
    """
    if is_mailbox(address):
        return f"{address}/{shard_name(shard)}" if shard else address
    return f"socks5://{address.removeprefix('tcp://')}/{shard_name(shard)}" if shard else address


def at_relay(relay: str, node: str, near: str) -> str:
    """Return the address of a node that is met through a relay.

    Args:
        relay: tcp://host:port of the relay; "": it is at the server.
        node: the name of the node.
        near: host:port of the node itself.
    """
    return f"socks5://{relay.removeprefix('tcp://')}/{node}@{near}"


def reached_by(address: str, server: str) -> str:
    """Return the address of a peer with the place of its relay.

    Args:
        address: as the peer has declared it.
        server: host:port at which this process reaches the server.
    """
    return f"socks5://{server}/{address.removeprefix(AT_SERVER)}" if address.startswith(AT_SERVER) else address


def shard_address(server: str, port: int, shard: int) -> str:
    """Return the address of a shard.

    Args:
        server: where its server is dialled, tcp://host:port.
        port: of the shard on the same host; 0: it is behind the port of `server`.
        shard: its number.
    """
    return f"{server.rpartition(':')[0]}:{port}" if port else behind(server, shard)


def by_proxy(address: str) -> tuple[str, str, str] | None:
    """Return the proxy, host:port, the host to ask it for, and its near place; None for an address without a proxy.

    The host is a shard behind the one port of its server, or a node that is met through a relay. The near place is
    host:port where peers of the node's own network ask for it, "" for none.
    """
    match = BEHIND.fullmatch(address)
    return (match[1], match[2] or match[3], match[4] or "") if match else None


def front(address: str) -> str:
    """Return where TCP dials an address that a peer sent, tcp://host:port: for a shard behind one port that port."""
    bare, _ = parted(address)
    return f"tcp://{by[0]}" if (by := by_proxy(bare)) else bare


def local_endpoint(port: int, shard: int = 0) -> str:
    """Return the Unix socket (Linux, abstract name) of the server that listens on this TCP port of the same machine.

    `shard`: the number of the shard, where the shards of a server share one port.

    The Unix socket moves a model a quarter faster than TCP over loopback. Its name belongs to the network namespace, as
    the port does.
    """
    return f"ipc://@narrows-{port}-{shard}" if shard else f"ipc://@narrows-{port}"


def is_stored(place: str) -> bool:
    """True if this place of files, as `located` returns it, is an address in an object store, and no path."""
    scheme, there, _ = place.partition("://")
    return bool(there) and scheme in STORES


def located(flag: str, value: str) -> str:
    """Return the path, or the address in a store, that a flag names. file:///FOLDER becomes a path.

    Raises:
        UsageError: the scheme is not known, or there is no bucket.
    """
    scheme, there, rest = value.partition("://")
    if not there:
        return value
    if scheme == "file":
        path = rest.removeprefix("localhost")
        if not path.startswith("/"):
            raise UsageError(f"{flag} {value}: a folder of this machine is file:///FOLDER, with three slashes")
        return re.sub(r"(%[0-9a-fA-F]{2})+", lambda found: _unescaped(found[0]), path)
    if scheme not in STORES:
        known = ", ".join(f"{name}://BUCKET/NAME" for name in STORES)
        raise UsageError(
            f"{flag} {value}: {scheme}:// is no store that is known; give {known}, file:///FOLDER or a path"
        )
    if not re.fullmatch(r"[^/\s?#]+(/.*)?", rest):
        raise UsageError(f"{flag} {value}: name a bucket, as in {scheme}://BUCKET/NAME")
    return f"{scheme}://{rest.rstrip('/')}"


def _unescaped(text: str) -> str:
    """Return what a run of %XX in a URL stands for."""
    return bytes.fromhex(text.replace("%", "")).decode("utf-8", "surrogateescape")
