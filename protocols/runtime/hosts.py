"""Which address of a machine leads where."""

from __future__ import annotations

import contextlib
import socket
import sys

from narrows.protocols.addresses import ANY_HOSTS, LOCAL_HOSTS, local_endpoint, parse_address

PROBE_S = 1.0  # a Unix socket of this machine answers at once, or not at all


def endpoint(host: str, port: int) -> str:
    """Where to dial: the Unix socket of a server on this machine, where there is one, else TCP."""
    if sys.platform == "linux" and host in LOCAL_HOSTS:
        local = local_endpoint(port)
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(PROBE_S)
            probe.connect("\0" + local.removeprefix("ipc://@"))
            return local
    return f"tcp://{host}:{port}"


def own_host(host: str, port: int) -> str:
    """The address of this machine that leads to `host`: where peers on the same network reach it."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: nothing is sent
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


def reached(bound: str, parent: str) -> str:
    """The host by which other clusters reach what is bound to `bound`: that itself, or the address that leads to `parent`."""
    host = bound.removeprefix("tcp://").rpartition(":")[0]
    if host not in ANY_HOSTS:
        return host
    with contextlib.suppress(OSError):
        return own_host(*parse_address("--parent", parent))
    return socket.gethostname()
