"""The life of one server process: it stands by, if its config says so, and then serves."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial

from narrows.protocols.addresses import is_mailbox
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.mailbox.mailbox import Mailbox
from narrows.protocols.runtime.mailbox.ports import JoinedPorts
from narrows.protocols.runtime.mailbox.stores import MeteredStore, store_of
from narrows.protocols.runtime.network.key_files import SERVER
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.runner import ServerRunner
from narrows.ps.process.standby_runner import StandbyRunner


def run(config: ServerConfig, ready: Callable[..., None]) -> None:
    """Serve until the run is over or stdin ends.

    Args:
        config: the config of the process.
        ready: is called once the port is bound, with `port`, `epoch` (the first epoch of this life of the coordinator,
            0 in a process without one) and `parent` (the parent's address).

    Raises:
        NarrowsError: the run has ended with an error.
    """
    access_control = AccessControl(config.keys, config.parent_key, config.secret, config.coordinator, config.follows)
    made = Sockets(
        known_as=access_control.name_at,
        curve=access_control.curve,
        connections=access_control.connections,
        faulted=access_control.faulted,
        shares=config.shared_memory,
    )
    with contextlib.closing(made) as sockets:
        bound = sockets.listen(config.bind, config.beside)
        number = (
            0 if config.one_port or config.via else bound
        )  # what peers are told: 0 means the port that they dialled
        follower = StandbyRunner(config, sockets, number, access_control) if config.follows else None
        if follower is not None:
            sockets.report_to(follower.cut)
            ready(port=bound, epoch=0, parent=config.parent)
            if not follower.loop(sockets):
                return emit("done", dropped={}, refused=access_control.totals())
        mailboxes = met_in(config, access_control, sockets.wake)
        port = JoinedPorts(sockets, mailboxes, partial(tell_counts, config.index)) if mailboxes else sockets
        runner = ServerRunner(config, port, number, access_control, follower)
        sockets.report_to(runner.cut, runner.linked, runner.shut_out)
        for mailbox in mailboxes:
            mailbox.report_to(runner.linked)
        if runner.journal is not None and runner.journal.pools is not None:
            sockets.memory.keep_pools(runner.journal.pools.keep)
        coordinator = runner.server.coordinator
        epoch = coordinator.run.first_epoch if coordinator is not None else 0
        ready(port=bound, epoch=epoch, parent=runner.server.above if coordinator is not None else config.parent)
        try:
            runner.loop(sockets)
        finally:
            for mailbox in mailboxes:
                mailbox.close()
                tell_counts(config.index, mailbox, last=True)
    if runner.stop_by < float("inf") and not (config.keeps or config.host) and config.folder is not None:
        # ps-serve, which would remove the folder, may have been killed. The folder of a remote host stays: the next
        # shard of this machine needs it.
        shutil.rmtree(config.folder, ignore_errors=True)
    if runner.end.code:
        raise BY_EXIT_CODE.get(runner.end.code, NarrowsError)(runner.end.text)
    totals(runner)


def met_in(config: ServerConfig, access_control: AccessControl, notify: Callable[[], None]) -> list[Mailbox]:
    """Return the mailboxes of a server process: the one of its members, and the one of its parent.

    ps-serve has tested their stores.

    Args:
        config: the config of the process.
        access_control: whose keys and names hold there too.
        notify: ends the wait of the process.

    Raises:
        UsageError: a library of a store is missing.
    """
    made, curve, refused = list[Mailbox](), access_control.curve, access_control.faulted
    if config.via:
        assert curve is not None and curve.own is not None
        of_members = Mailbox(
            config.via,
            MeteredStore(store_of(config.via)),
            curve.own,
            shard=config.index,
            admits=curve.admits,
            claim=config.claim,
            refused=refused,
            notify=notify,
        )
        made.append(of_members)
    key = access_control.parent_key
    if is_mailbox(config.parent) and key is not None:
        store, name = MeteredStore(store_of(config.parent)), access_control.name_above
        made.append(
            Mailbox(config.parent, store, key.pair, server=key.server, name=name, refused=refused, notify=notify)
        )
    return made


def tell_counts(shard: int, mailbox: Mailbox, last: bool = False) -> None:
    """Tell ps-serve what this process has asked of a store. `last`: the process ends, and the console shows it."""
    counts = mailbox.store.counts
    values = {"shard": shard, "address": mailbox.address, **counts.told()}
    text = {"text": f"shard {shard} asked {mailbox.address}: {counts.text()}"} if last else {}
    emit("log", name="mailbox", values=values | text)


def totals(runner: ServerRunner) -> None:
    """Tell ps-serve that this process is done, how many bytes it moved, and which messages it dropped or refused."""
    dropped = dict(runner.drops.counts)
    if runner.config.parent:
        there = f"{runner.config.parent} and its clusters" if runner.dialled.clusters else runner.config.parent
        moved = f"pushed {runner.bytes_up / 1e6:.2f} MB to {there} and pulled {runner.bytes_down / 1e6:.2f} MB"
        values = {"bytes_up": runner.bytes_up, "bytes_down": runner.bytes_down, "dropped": dropped}
        text = f"shard {runner.config.index} {moved}"
        emit("log", name="above", values={"shard": runner.config.index, **values, "text": text})
    for name, size in sorted(runner.access_control.sent.items()):
        if name != SERVER:
            text = f"shard {runner.config.index}: {name} sent {size / 1e6:.2f} MB"
            emit("log", name="sent", values={"shard": runner.config.index, "name": name, "bytes": size, "text": text})
    emit("done", dropped=dropped, refused=runner.access_control.totals(), over=runner.server.over)
