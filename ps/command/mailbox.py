"""The mailboxes of one ps-serve: which flags go with them, the test of the store, the claim, and the end.

Shards dial the mailbox themselves (ps/process/process_lifecycle.py). ps-serve opens it before they start, so that a wrong
credential is one sentence. It says by an object that it serves there, and removes all of the run's objects at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

from narrows.protocols.addresses import KEYLESS, is_loopback, is_mailbox, parse_address, parse_mailbox, shard_name
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.command.console import say

BIND = "tcp://127.0.0.1:5555"  # the default of --bind: with --via the shards here dial each other at any port


def mailboxes_checked(
    via: str, parent: str, bind: str, keys: str, parent_key: str, apart: Mapping[str, object]
) -> tuple[str, str]:
    """Check the flags that do not go with a mailbox.

    Args:
        via: the value of --via, "" for none.
        parent: the value of --parent; it may be a mailbox too.
        bind: the value of --bind.
        keys: the value of --keys.
        parent_key: the value of --parent-key.
        apart: by flag, a value that is true if the user has given it: these do not go with a mailbox.

    Returns:
        The addresses of both, without a slash at the end.

    Raises:
        UsageError: the flags exclude each other.
    """
    if via:
        via = parse_mailbox("--via", via)
        if not keys:
            raise UsageError(
                f"--via {via}: what lies in a mailbox is sealed, so that the owner of the store reads nothing: ps-serve keys "
                "init DIR makes keys for --keys DIR"
            )
        if not is_loopback(parse_address("--bind", bind, any_port=True)[0]):
            raise UsageError(f"--bind {bind}: with --via no other machine dials this server; leave it out")
    where = f"--via {via}" if via else f"--parent {parent}"
    if is_mailbox(parent):
        parent = parse_mailbox("--parent", parent)
        if not parent_key:
            raise UsageError(f"--parent {parent}: {KEYLESS.replace('--key', '--parent-key')}")
        if parent == via:
            raise UsageError(f"--via {via}: the parent of this server has this mailbox; name another RUN")
    for flag in [flag for flag, value in apart.items() if value]:
        raise UsageError(f"{where}: {flag} needs processes that dial each other; leave one of the two out")
    return via, parent


def few_round_trips(settings: Settings) -> None:
    """Check that the members of a run meet rarely enough for a mailbox. Raises UsageError."""
    if settings.sync != "local" or settings.mode().rule is FoldRule.OPTIMIZER or settings.start_steps > 0:
        what = "--start-steps" if settings.sync == "local" else f"--sync {settings.sync}"
        raise UsageError(
            f"--via: {what} makes a round trip for each step, which takes seconds in a mailbox; choose --sync local, without "
            "--start-steps"
        )
    if settings.replan == "change":
        raise UsageError("--via: --replan change may choose a mode with a round trip for each step; leave it out")


class ServedMailbox:
    """The mailboxes that this ps-serve uses, from before its first shard to after its last.

    Args:
        via: the one of its members, "" for none.
        parent: the address of its parent, which may be a mailbox.
        keys: the folder of its keys.

    Raises:
        NarrowsError: a store cannot be used.
    """

    def __init__(self, via: str, parent: str, keys: str) -> None:
        from narrows.protocols.runtime.mailbox.inbox import claimed
        from narrows.protocols.runtime.mailbox.mailbox import pace_of, round_trip_s
        from narrows.protocols.runtime.mailbox.stores import cleared, opened
        from narrows.protocols.runtime.network.key_files import server_key

        self.via, self.claim, self.round_trip_s = via, "", 0.0
        for address in (via, parent):
            if not is_mailbox(address):
                continue
            store = opened(address)
            self.round_trip_s = max(self.round_trip_s, round_trip_s(store, pace_of(address)))
            if address == via:
                # What lies in the boxes of shards may be a Hello for this server: the shards look at it themselves.
                self.store, left = store, cleared(store, keep=(shard_name(0)[:-1],))
                self.claim = claimed(store, server_key(keys).pair)
                if left:
                    say(f"{via}: {left} objects of an earlier run were removed")

    def close(self) -> None:
        """Remove all of the run's objects, unless another ps-serve serves there now."""
        from narrows.protocols.runtime.mailbox.inbox import SERVES
        from narrows.protocols.runtime.mailbox.stores import cleared

        if not self.via:
            return
        try:
            if f"{shard_name(0)}/{SERVES}{self.claim}" in self.store.list(""):
                cleared(self.store)
        except OSError as error:
            say(f"{self.via}: the objects of this run are left there ({error})", error=True)
