"""The ticket by which a node of a gossip run registers at a relay: its name there, and a key of its own.

How it works

    coordinator ── Welcome.relay: name, key ──> node ── register `name`, proof ──> relay
                                                node <── nonce ───────────────────

1. Coordinator and relay share a secret. The coordinator makes a name for each node that no stranger can guess
   (`node_name`), and its key (`node_key`).
2. The relay sends a nonce to each connection that wants to register. The node proves that it has the key of the name
   (`proof`). Neither key nor secret goes to the relay.
3. The relay computes the same key of the name (`node_key`). It keeps no list of names, so several runs may share it.

HMAC-SHA256 is that of RFC 2104. A member of the run knows the names of all nodes and the key of its own alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from narrows.protocols.addresses import NODE, NODE_HEX, is_address
from narrows.protocols.errors import RemoteProtocolError

SECRET_BYTES = 32  # of the secret that coordinator and relay share
NONCE_BYTES = 16
PROOF_BYTES = 32
KEY = re.compile(r"[0-9a-f]{64}")


def checked(ticket: Sequence[str]) -> tuple[str, str, str]:
    """Return name, key and the relay's address of a ticket that a server sent; the address may be "".

    Raises:
        RemoteProtocolError: it is no ticket.
    """
    if len(ticket) != 3 or not (NODE.fullmatch(ticket[0]) and KEY.fullmatch(ticket[1])):
        raise RemoteProtocolError("the server sent a ticket without a name or a key")
    if ticket[2] and not (ticket[2].startswith("tcp://") and is_address(ticket[2])):
        raise RemoteProtocolError("the server sent a ticket of a relay without an address")
    return ticket[0], ticket[1], ticket[2]


def _mac(key: bytes, *words: bytes) -> bytes:
    return hmac.new(key, b" ".join(words), hashlib.sha256).digest()


def node_name(secret: str, token: str) -> str:
    """Return the name of a node.

    Args:
        secret: of coordinator and relay, in hex digits.
        token: of the Hello with which the node joined.
    """
    return f"node-{_mac(bytes.fromhex(secret), b'name', token.encode()).hex()[:NODE_HEX]}"


def node_key(secret: str, name: str) -> str:
    """Return the key of the node of this name, in hex digits."""
    return _mac(bytes.fromhex(secret), b"key", name.encode()).hex()


def proof(key: str, name: str, nonce: bytes) -> bytes:
    """Return bytes[PROOF_BYTES]: the sender has the key of the name, and answers this nonce."""
    return _mac(bytes.fromhex(key), name.encode(), nonce)


def proves(secret: str, name: str, nonce: bytes, given: bytes) -> bool:
    """True if `given` is the proof of the node of this name for this nonce."""
    return hmac.compare_digest(proof(node_key(secret, name), name, nonce), given)
