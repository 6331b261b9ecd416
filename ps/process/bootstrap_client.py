"""The first question of a server that will stand by, or of a machine that will join: what must I know of the server?

It is asked before there is a process for each shard; bootstrap_server.py answers.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.errors import AuthenticationError, IncompatibleError, RemoteProtocolError, UnreachableError
from narrows.protocols.runtime.network.curve_auth import HandshakeFailure
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Peer, Sockets
from narrows.protocols.wire import decode, encode, unpack
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.machine_factory import UNKNOWN, release

CONNECT_S = 30.0
AGAIN_MS = 500
TOLD = {"release", "settings", "ports", "hash_seed", "secret", "parent", "has_parent_key"}


STANDBY = m.ReplicationFollow(-1, -1)
JOIN = m.RemoteShardsOffer("", "", 0, -1, m.RemoteShardsWish.STAY)


def ask(flag: str, address: str, keys: str, question: m.Message = STANDBY) -> dict[str, Any]:
    """Ask a server what its standby, or with JOIN a remote host, has to know.

    Args:
        flag: the flag that names the address, for errors.
        address: of the server's shard 0.
        keys: folder of --keys, "": connections are not encrypted.
        question: STANDBY or JOIN.

    Returns:
        The fields of `machine_factory.introduction`.

    Raises:
        UnreachableError: no server answered within CONNECT_S, or it has not started all of its shards by then.
        AuthenticationError: the server has other keys.
        IncompatibleError: the server runs another release, or has no room for a standby or a remote host.
    """
    refused, answers = list[HandshakeFailure](), list[dict[str, Any]]()
    early: list[dict[str, Any]] = []  # answers of a server that was still starting its shards

    def hear(peer: Peer, frames: list[m.Buffer]) -> None:
        if answers:
            return
        message = decode(frames)
        if isinstance(message, m.Refuse):
            raise IncompatibleError(f"{address}: {message.text}")
        if isinstance(message, m.ReplicationBegin):
            told = checked(address, unpack(message.told))
            (early if UNKNOWN in told["ports"] else answers).append(told)

    access_control = AccessControl(keys, "", "", "", address)
    with contextlib.closing(
        Sockets(curve=access_control.curve, failed=lambda address, why, public: refused.append(why))
    ) as sockets:
        deadline = time.monotonic() + CONNECT_S
        again = Loop(sockets, hear, lambda now_ns: sockets.send(address, encode(question)), tick_ms=AGAIN_MS)
        sockets.send(address, encode(question))
        again.run(time.monotonic_ns, lambda: not answers and not refused and time.monotonic() < deadline)
    if answers:
        return answers[0]
    if refused:
        text = "the keys there are others: give --keys with a copy of the folder that the server has"
        raise AuthenticationError(f"{flag} {address}: {text}")
    if early:
        raise UnreachableError(f"{address}: the server has not started all of its shards; try again")
    raise UnreachableError(f"{flag} {address}: no server answered within {CONNECT_S:.0f} s")


def checked(address: str, told: Any) -> dict[str, Any]:
    """Return the answer `told` of the server at `address` after its check.

    Raises:
        RemoteProtocolError: a field is missing.
        IncompatibleError: the server runs another release.
    """
    if not isinstance(told, dict) or not told.keys() >= TOLD:
        raise RemoteProtocolError(f"{address}: the server's description of itself is incomplete")
    if told["release"] != release():
        raise IncompatibleError(f"{address}: the server runs {told['release']}, and this machine {release()}")
    return told
