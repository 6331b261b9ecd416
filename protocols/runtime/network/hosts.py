"""Hosts and addresses of this machine and of others: the endpoint to dial, IPv6 or not, the own address, the memory."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
from pathlib import Path

from narrows.protocols.addresses import (
    ANY_HOSTS,
    LOCAL_HOSTS,
    behind,
    bracketed,
    front,
    is_mailbox,
    local_endpoint,
    parse_address,
)

PROBE_S = 1.0  # a Unix socket of this machine answers at once, or not at all


def peer_uid(line: socket.socket) -> int:
    """Return the user id of the process at the other end of a connected Unix socket (Linux)."""
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def endpoint(host: str, port: int, shard: int = 0) -> str:
    """Return the endpoint to dial: the Unix socket of a server on this machine, else TCP.

    Any local user can take the name of that socket. So it is used only if root or the user of this process listens.

    Args:
        host: of the server.
        port: of the server.
        shard: the number of the shard, where the shards of the server share one port.
    """
    if sys.platform == "linux" and host in LOCAL_HOSTS:
        local = local_endpoint(port, shard)
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(PROBE_S)
            probe.connect("\0" + local.removeprefix("ipc://@"))
            if peer_uid(probe) in (0, os.getuid()):
                return local
    return behind(f"tcp://{host}:{port}", shard)


def is_ipv6(host: str) -> bool:
    """True if only IPv6 leads to `host`: an address in brackets, or a name without an IPv4 address.

    A server listens to IPv4 by default, so a name with both kinds is dialled over IPv4.
    """
    if host.startswith("[") or ":" in host:
        return True
    if host in ANY_HOSTS or re.fullmatch("[0-9.]+", host):
        return False
    with contextlib.suppress(OSError):
        return socket.AF_INET not in {row[0] for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return True  # unknown name: ZeroMQ looks it up each time that it dials, and with IPv6 on takes either kind


def unknown(host: str) -> str:
    """Return why the name `host` cannot be resolved, a clause; "" for a name that can, and for an address."""
    try:
        socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"this machine knows no host {host} ({error.strerror})"
    except OSError as error:
        return f"{host} is no host ({error.strerror or error})"
    return ""


def own_host(host: str, port: int) -> str:
    """Return the address of this machine on the way to `host`: peers on that network reach this machine there."""
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: nothing is sent
        found = str(probe.getsockname()[0])
    return bracketed(found)


def reached(bound: str, parent: str) -> str:
    """Return the host by which others reach a server that is bound to `bound`.

    Returns:
        The host of `bound`, or if that is any address, the address of this machine on the way to `parent`.
    """
    host = bound.removeprefix("tcp://").rpartition(":")[0]
    if host not in ANY_HOSTS:
        return host
    if is_mailbox(parent):  # nobody dials this process by its host
        return socket.gethostname()
    with contextlib.suppress(OSError):
        return own_host(*parse_address("--parent", front(parent)))
    return socket.gethostname()


def memory_bytes() -> int:
    """Return the bytes of memory that this computer has, or that its container may use."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most
