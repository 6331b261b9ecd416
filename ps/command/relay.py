"""The relay of a gossip run: `ps-serve relay`, which stands alone, and what ps-serve tells its workers of a relay."""

from __future__ import annotations

import secrets
from pathlib import Path

from narrows.protocols.addresses import parse_address
from narrows.protocols.errors import UsageError
from narrows.protocols.gossip.relay_ticket import SECRET_BYTES
from narrows.protocols.runtime.processes import signals
from narrows.ps.command.console import say
from narrows.ps.command.one_port import OnePort
from narrows.ps.process.main import may_open_more
from narrows.ps.process.port_relay import TURN_S, most_connections
from narrows.ps.relay.node_relay import NodeRelay, RelayedCount

COUNT_S = 60.0  # between two lines of bytes


def place(relay_at: str, relay_key: str, one_port: bool, mixes: bool) -> tuple[str, str]:
    """Return the relay at which workers of a run may meet.

    Args:
        relay_at: the value of --relay-at.
        relay_key: the value of --relay-key.
        one_port: the value of --one-port.
        mixes: the run is one of gossip.

    Returns:
        The address of the relay, "" for the one port of this server; and its secret, "" if the run has no relay.

    Raises:
        UsageError: the flags exclude each other, or the file holds no key of a relay.
    """
    from narrows.protocols.runtime.network.key_files import relay_secret

    for flag, value, other in (("--relay-at", relay_at, "--relay-key"), ("--relay-key", relay_key, "--relay-at")):
        if value and not mixes:
            raise UsageError(f"{flag} {value}: workers meet at a relay only under --sync gossip; leave it out")
        if value and not (relay_at and relay_key):
            raise UsageError(
                f"{flag} {value}: give {other} too: the address of a ps-serve relay, and a copy of its --key"
            )
    if relay_at:
        parse_address("--relay-at", relay_at)
        return relay_at, relay_secret(relay_key, "--relay-key")
    return "", secrets.token_hex(SECRET_BYTES) if one_port and mixes else ""


def serve_relay(bind: str, key: str) -> int:
    """Serve a relay until a signal ends it. Returns the exit code of ps-serve.

    Args:
        bind: tcp://host:port.
        key: the file of the secret. It is made if there is none.

    Raises:
        UsageError: the address cannot be bound, or the file holds no key of a relay.
    """
    from narrows.protocols.runtime.network.key_files import make_relay_key, relay_secret

    may_open_more()
    host, port = parse_address("--bind", bind, any_port=True)
    made = not Path(key).exists()
    if made:
        make_relay_key(key)
    secret, front, heard = relay_secret(key, "--key"), OnePort(host, port), list[int]()
    relay = NodeRelay(front.listener, most_connections(), secret, say)
    signals.hear(heard)
    say(f"relays at tcp://{host}:{front.port}; for the run: ps-serve --sync gossip --relay-at tcp://HOST:{front.port} "
        f"--relay-key {Path(key).name}")  # fmt: skip
    if made:
        say(f"{key} is made: copy it to the machine of that ps-serve over a safe channel; it is a secret")
    count = RelayedCount(relay, lambda values: say(f"{count.text}; nodes registered: {values['nodes']}"), COUNT_S)
    while not heard:
        relay.turn(TURN_S)
        count.turn()
    relay.close()
    while not relay.closed:
        relay.turn(TURN_S)
    relay.free()
    say(count.text)
    return 0
