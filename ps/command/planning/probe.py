"""ps-probe: measures the links between machines, pair by pair, and writes network.json.

How it works

1. With --merge or --run nothing is sent: `command` reads files, or the figures of a run's dashboard.
2. With --join this machine measures: `_join` runs a `ProbeMachineRunner` until the director ends it.
3. Otherwise this machine directs: `_direct` opens the port of the director, starts ps-probe on each HOST by ssh
   (`SshCommands`), and runs a `ProbeDirectorRunner`. Unless --only-others is given, a thread of this process measures
   too (`beside`).
4. `_write` shows the links that were found, and writes them with those that were known before.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, PLACE, run
from narrows.protocols.runtime.cli.output import CommandConsole, replace_text
from narrows.ps.probe import measured_network
from narrows.ps.probe.byte_budget import LEAST_PAIR_BYTES
from narrows.ps.probe.director import MACHINES_MAX, ProbeDirector
from narrows.ps.probe.measured_network import MeasuredHost, MeasuredNetwork
from narrows.ps.probe.messages import ProbeJoin
from narrows.ps.probe.probe_schedule import again

BIND = "tcp://0.0.0.0:5600"
PAIR_BYTES = 1 << 30  # the default of --bytes for each pair


@click.command(context_settings=COMMAND)
@click.argument("hosts", nargs=-1, metavar="[HOST... | FILE...]")
@click.option("--bind", default="", metavar="ADDR", help=f"direct: wait for machines here [with HOST...: {BIND}]")
@click.option(
    "--machines", type=click.IntRange(2, MACHINES_MAX), help="number of machines, with this one [HOST... and this one]"
)
@click.option("--only-others", is_flag=True, help="this machine directs, but is not measured")
@click.option(
    "--join",
    default="",
    metavar="ADDR",
    help="measure as the ps-probe at ADDR directs; ssh:PORT: on the machine that started this by ssh",
)
@click.option("--out", default="network.json", show_default=True, help="file for the measured network")
@click.option("--seconds", type=click.FloatRange(8, 600), default=20.0, show_default=True, help="limit of a round")
@click.option("--bytes", "bytes_max", type=float, help=f"limit of all pairs [{PAIR_BYTES / 1e6:,.0f} MB a pair]")
@click.option(
    "--wait", type=click.FloatRange(min=1), default=300.0, show_default=True, help="seconds to wait for the machines"
)
@click.option("--name", default="", help="name of this machine in network.json [its host name]")
@click.option("--host", default="", help="address at which others reach this machine [that towards the director]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="port of this machine's streams [any free port]")
@click.option("--keys", default="", metavar="DIR", help="admit only machines that have a key in this folder (--bind)")
@click.option("--key", default="", metavar="FILE", help="the key of this machine (--join); -: from stdin")
@click.option("--insecure", is_flag=True, help="allow addresses beyond loopback without keys")
@click.option(
    "--ssh", default="", metavar="COMMAND", help="starts {command} on {host} [ssh -o BatchMode=yes {host} {command}]"
)
@click.option(
    "--run", "page", default="", metavar="HOST:PORT", help="take the measurements of a run from its page (--dashboard)"
)
@click.option(
    "--record",
    default="",
    type=PLACE,
    metavar="FILE",
    help="take the seconds of a step from this record of ps-worker; each HOST reads its own record of this name",
)
@click.option(
    "--script",
    default="",
    metavar="'SCRIPT ARGS'",
    help="take the seconds of a step from 20 steps of this script, alone; each HOST runs it too",
)
@click.option(
    "--merge", is_flag=True, help="read FILE..., and write one network.json with the newest of each link and host"
)
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(hosts: tuple[str, ...], out: str, page: str, merge: bool, join: str, bind: str, **flags: Any) -> int:
    """Measure the links between machines: round trips, rates by size and number of streams, loss, cores.

    \b
    ps-probe HOST...                                   starts ps-probe on each HOST by ssh
    ps-probe --bind tcp://0.0.0.0:5600 --machines 3    waits for two machines; on each of them run
    ps-probe --join tcp://HOST:5600                    this command
    ps-probe --run HOST:5550                           takes the measurements of a run, and sends nothing
    ps-probe --merge a.json b.json                     makes one file of several
    """
    if (join and (bind or hosts)) or (merge and (join or bind or page)):
        raise UsageError("give one of --join, --merge, and HOST... or --bind")
    if join:
        return _join(join, flags)
    found = MeasuredNetwork()
    if merge:
        if not hosts:
            raise UsageError("--merge: name the files")
        for path in hosts:
            found.add(_read(path))
        return _write(out, found, 0)
    if page:
        found.add(_of_run(page, flags["name"]))
    if not (hosts or bind):
        if not page:
            raise UsageError(
                "give HOST..., --bind with --machines, --join, --run or --merge; --help has an example of each"
            )
        return _write(out, found, 0)
    return _direct(hosts, bind or BIND, out, found, flags)


def _read(path: str) -> MeasuredNetwork:
    try:
        return measured_network.parse(json.loads(Path(path).read_text()))
    except (OSError, ValueError, AttributeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None


def _of_run(page: str, server: str) -> MeasuredNetwork:
    from narrows.ps.dashboard.record_reader import frames

    try:
        return measured_network.of_run(next(frames(page)), server, time.time())
    except (KeyError, TypeError, IndexError) as error:
        raise UsageError(f"--run {page}: the page there is of another release of narrows ({error})") from None


def _write(out: str, found: MeasuredNetwork, code: int) -> int:
    """Show the links and write network.json; return `code`. Raise UsageError where no link is known."""
    if not found.links:
        raise UsageError("nothing is known of any link yet")
    if kept := replace_text(out, json.dumps(found.document(), indent=1) + "\n", "--out"):
        click.echo(f"the measurements that were there are kept as {kept}", err=True)
    click.echo("\n".join([*measured_network.table(found), "", f"{out} has it"]))
    return code


_say = CommandConsole("ps-probe").say


def _towards(hosts: Sequence[str]) -> str:
    """Return this machine's address towards the first of these hosts that it reaches; "" where it reaches none."""
    from narrows.protocols.runtime.network.hosts import own_host

    for host in hosts:
        with suppress(OSError):
            if host:
                return own_host(host, 1)
    return ""


def _joins(flags: dict[str, Any], host: str) -> ProbeJoin:
    from narrows.protocols.runtime.network.hosts import memory_bytes

    return ProbeJoin(flags["name"] or socket.gethostname(), host, memory_bytes())


def _join(address: str, flags: dict[str, Any]) -> int:
    from narrows.protocols.addresses import is_loopback, parse_address
    from narrows.protocols.runtime.network.hosts import own_host
    from narrows.protocols.runtime.network.key_files import refusal
    from narrows.ps.command.planning.probe_runner import ProbeMachineRunner, by_ssh, key_of

    address = by_ssh(address)
    host, port = parse_address("--join", address)
    if not (flags["key"] or flags["insecure"] or is_loopback(host)):
        raise UsageError(
            f"--join {address}: give --key FILE, which its owner makes with ps-serve keys add, or --insecure"
        )
    key = key_of(flags["key"]) if flags["key"] else None
    try:
        joins = _joins(flags, flags["host"] or own_host(host, port))
    except OSError as error:
        raise UsageError(f"--join {address}: {error.strerror}") from None
    pair, steps = (key.pair, key.server) if key is not None else None, _steps(flags)
    ProbeMachineRunner(
        address, joins, steps, flags["port"], pair, flags["wait"], lambda why: refusal(why, key, "--key")
    ).run()
    return 0


def _steps(flags: dict[str, Any]) -> Callable[[threading.Event], float]:
    from narrows.ps.command.planning.step_time import step_seconds

    return partial(step_seconds, flags["record"], flags["script"])


def _direct(hosts: tuple[str, ...], bind: str, out: str, found: MeasuredNetwork, flags: dict[str, Any]) -> int:
    from narrows.protocols.addresses import is_loopback, parse_address
    from narrows.ps.command.planning.probe_runner import (
        SSH,
        ProbeDirectorRunner,
        ProbeMachineRunner,
        SshCommands,
        beside,
        own_keys,
        secret,
    )

    own = 0 if flags["only_others"] else 1
    count = flags["machines"] or len(hosts) + own
    if count < max(2, len(hosts) + own):
        raise UsageError(f"--machines {count}: two or more are needed, this one and each HOST included")
    pairs = count * (count - 1) // 2 + again(count)
    bytes_max = int(flags["bytes_max"] or pairs * PAIR_BYTES)
    if bytes_max < (least := pairs * LEAST_PAIR_BYTES):
        raise UsageError(f"--bytes {bytes_max}: {pairs} pairs need {least} or more, as each stream has 64 KiB at least")
    with ExitStack() as stack:
        folder = flags["keys"]
        if hosts and not (folder or flags["insecure"]):
            folder = stack.enter_context(own_keys())
        if not (folder or flags["insecure"] or is_loopback(parse_address("--bind", bind, any_port=True)[0])):
            raise UsageError(
                f"--bind {bind}: anyone who reaches it could take part; ps-serve keys init DIR makes keys for --keys DIR, and "
                "--insecure goes without them"
            )
        probe = ProbeDirector(count, flags["seconds"], bytes_max, secret(), found.pairs)
        director = stack.enter_context(closing(ProbeDirectorRunner(probe, bind, folder, _say)))
        _say(
            f"waits for {count} machines on {bind.rpartition(':')[0]}:{director.port}, for at most {flags['wait']:g} s"
        )
        more = [word for name in ("record", "script") if flags[name] for word in (f"--{name}", flags[name])]
        started = stack.enter_context(closing(SshCommands(hosts, flags["ssh"] or SSH, director, folder, more)))
        check: Callable[[], None] = lambda: None  # noqa: E731
        if own:
            guard, joins = director.guard, _joins(flags, flags["host"])
            pair = (guard.own.pair, guard.own.public) if guard is not None else None
            measurer = ProbeMachineRunner(director.address, joins, _steps(flags), flags["port"], pair, flags["wait"])
            check = stack.enter_context(beside(measurer, _say))

        def ended() -> list[tuple[str, str]]:
            check()
            return started.ended()

        director.run(flags["wait"], ended)
        now = time.time()
        here = _towards([machine.join.host for machine in probe.machines])
        for machine in probe.machines:
            join = machine.join
            address = join.host or here
            found.add_host(
                join.name, MeasuredHost(now, join.memory_bytes or None, machine.step_s or None, address=address)
            )
        for way, link in probe.links().items():
            found.add_link(way, replace(link, unix_s=now))
    seconds = (time.monotonic_ns() - (probe.began_ns or 0)) / 1e9
    _say(f"{len(probe.found)} of {probe.pairs} pairs were measured in {seconds:.1f} s, with {probe.sent / 1e6:,.1f} MB")
    for why in probe.failed:
        _say(f"not measured: {why}")
    return _write(out, found, 1 if probe.failed else 0)


def main() -> None:
    run(command, "ps-probe")


if __name__ == "__main__":
    main()
