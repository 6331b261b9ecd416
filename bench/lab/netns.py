"""The network lab: hosts as network namespaces of this machine, joined by links with a rate, a delay, jitter and loss.

    python bench/lab/netns.py --rate 100mbit --delay 20ms --loss 0.1%  # what TCP gets through such a link
    python bench/lab/netns.py --table                                  # the same for the links of LINKS
    python bench/lab/netns.py --rate 20mbit --delay 60ms -- COMMAND    # COMMAND on one of two hosts; $LAB_NETNS is the other

In a test or a benchmark:

    with pair(Way(rate=20e6, delay_s=0.06)) as lab:  # Way: from link
        here, there = lab.hosts
        there.popen(["ps-serve", "--bind", f"tcp://{there.address}:5555", "--insecure"])
        here.run(["ps-worker", "--server", f"tcp://{there.address}:5555", "train.py"], limit_s=60)
        lab.links[0].change(rate=5e6)  # while it runs, as cut() and mend()
        received, sent = here.bytes()

Rules
- link.c says what queue, jitter and loss mean exactly.
- Bytes are the kernel's, read at the interface: IP packets with their headers, acks and retransmissions.
- All is gone when the block ends, by an exception or SIGTERM too: processes, links, namespaces. Leftovers of a
  killed run are found by name, which holds its pid, and removed by the next.
- Needs Linux, root, /dev/net/tun, ip and cc: `available()` says what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, path_meter, record
from lab.launch import CommandFailed
from lab.link import COMMAND_S, GONE_S, MTU, Link, Way

NETNS = Path("/run/netns")
TUN = Path("/dev/net/tun")
NAME = re.compile(r"narrows-(\d+)-")
LINKS_MAX = 250  # a byte of the address
DEVICE_PACKETS = 2000  # that the kernel holds for a link that is late
CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
CLONE_NEWNET = 0x40000000

# Per namespace. Buffers: half of one is overhead, so these carry 1 Gbit/s over a round trip of 250 ms, and the kernel's own
# 4 MB only 80 Mbit/s over 200 ms. Metrics: what one connection has found out about a path must not speed up the next one.
# IPv6: its neighbour discovery would be among the bytes.
FORWARDS = "net/ipv4/ip_forward"
SYSCTLS = {
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_no_metrics_save": "1",
    FORWARDS: "1",  # for the switch of a star
    "net/ipv6/conf/all/disable_ipv6": "1",
}
CONGESTION = "cubic"  # the kernel's default, and so what two ordinary machines speak

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def available() -> str:
    """Empty, or what the lab lacks here, in one sentence."""
    needs: dict[str, Callable[[], object]] = {
        "root": lambda: os.geteuid() == 0,
        "the capabilities NET_ADMIN and SYS_ADMIN": lambda: _capabilities() & CAPABILITIES == CAPABILITIES,
        str(TUN): lambda: TUN.is_char_device() and os.access(TUN, os.R_OK | os.W_OK),
        "the command ip (iproute2)": lambda: shutil.which("ip"),
        "a C compiler named cc": lambda: shutil.which("cc"),
    }
    if sys.platform != "linux":
        return "the network lab needs Linux"
    return next((f"the network lab needs {what}" for what, there in needs.items() if not there()), "")


def _capabilities() -> int:
    effective = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(effective[1], 16) if effective else 0


class Host:
    """A network namespace with a loopback of its own. Processes started in it end with the lab."""

    def __init__(self, netns: str) -> None:
        self.netns, self.address = netns, ""
        self.processes: list[subprocess.Popen[Any]] = []

    def open(self) -> None:
        """Makes it. Raises CommandFailed."""
        ip("netns", "add", self.netns)
        ip("-n", self.netns, "link", "set", "lo", "up")
        with self.inside():
            for name, value in SYSCTLS.items():
                with suppress(FileNotFoundError):  # a kernel may have no IPv6
                    (Path("/proc/sys") / name).write_text(value)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread on this host: what it opens and starts meanwhile belongs there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        away = os.open(NETNS / self.netns, os.O_RDONLY)
        try:
            _enter(away)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(away)
            os.close(home)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen of this host; by default in launch.environment()."""
        with self.inside():
            process = subprocess.Popen(command, **({"env": launch.environment()} | options))
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], limit_s: float, env: dict[str, str] | None = None) -> str:
        """Its stdout. Raises CommandFailed."""
        with self.inside():
            return launch.run(command, limit_s, env)[0]

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """One that stays this host's, whoever uses it."""
        with self.inside():
            return socket.socket(socket.AF_INET, kind)

    def bytes(self) -> tuple[int, int]:
        """Received and sent at the interfaces of its links, as the kernel counts them."""
        with self.inside():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        columns = [line.split(":")[1].split() for line in lines if line.lstrip().startswith("wan")]
        return sum(int(column[0]) for column in columns), sum(int(column[8]) for column in columns)


class Lab:
    """Hosts, and links that join them; see pair() and star(). Raises CommandFailed."""

    def __init__(self, seed: int = 0, congestion: str = CONGESTION) -> None:
        """`seed`: of what is lost, and of jitter."""
        self.seed, self.congestion = seed, congestion
        self.hosts: list[Host] = []
        self.links: list[Link] = []
        self._stack = ExitStack()

    def __enter__(self) -> Lab:
        if missing := available():
            raise CommandFailed(missing)
        sweep()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for process in [process for host in self.hosts for process in host.processes][::-1]:
                launch.end(process)  # before its link, for it may have something to say yet
        finally:
            self._stack.close()

    def host(self) -> Host:
        host = Host(f"narrows-{os.getpid()}-{next(_numbers)}")
        self._stack.callback(remove, host.netns)  # one that is half made too
        host.open()
        self.hosts.append(host)
        return host

    def join(self, first: Host, second: Host, there: Way, back: Way | None = None) -> Link:
        """`there`: the way from first to second; `back`: the other, alike by default. All that first sends goes there."""
        number = len(self.links)
        assert number < LINKS_MAX
        device, ends = f"wan{number}", (first, second)
        link = Link([(host.netns, device) for host in ends], there, back or there, self.seed + number)
        self._stack.callback(link.close)
        self.links.append(link)
        own, peer = (f"10.77.{number}.{1 + end}" for end in range(2))
        for host, address, beyond in (first, own, "10.77.0.0/16"), (second, peer, own):
            ip("-n", host.netns, "address", "add", address, "dev", device)
            ip("-n", host.netns, "link", "set", device, "mtu", str(MTU), "txqueuelen", str(DEVICE_PACKETS), "up")
            # By route, for a namespace as a whole may only have what the machine's own tcp_allowed_congestion_control lists.
            ip("-n", host.netns, "route", "add", beyond, "dev", device, "congctl", self.congestion)
            host.address = host.address or address
        return link


@contextmanager
def pair(there: Way, back: Way | None = None, seed: int = 0, congestion: str = CONGESTION) -> Iterator[Lab]:
    """Two hosts and the link between them: two cities."""
    with Lab(seed, congestion) as lab:
        lab.join(lab.host(), lab.host(), there, back)
        yield lab


@contextmanager
def star(ways: Sequence[Way], seed: int = 0, congestion: str = CONGESTION) -> Iterator[Lab]:
    """Hosts that reach one another through a switch, the last of `hosts`; `links[i]` joins hosts[i] to it, alike both ways."""
    with Lab(seed, congestion) as lab:
        hosts = [lab.host() for _ in ways]
        switch = lab.host()
        for host, way in zip(hosts, ways, strict=True):
            lab.join(host, switch, way)
        yield lab


@contextmanager
def apart(ways: Sequence[Way], seed: int = 0, congestion: str = CONGESTION) -> Iterator[Lab]:
    """Hosts that reach the last of `hosts` alone, as those behind a NAT each do; `links[i]` joins hosts[i] to it."""
    with star(ways, seed, congestion) as lab:
        with lab.hosts[-1].inside():
            (Path("/proc/sys") / FORWARDS).write_text("0")
        yield lab


def ip(*words: str) -> str:
    return launch.run(["ip", *words], COMMAND_S)[0]


def _enter(netns: int) -> None:
    if _libc.setns(netns, CLONE_NEWNET) != 0:  # os.setns is of Python 3.12
        raise OSError(ctypes.get_errno(), "setns")


def remove(netns: str) -> None:
    """A namespace, and first whatever still runs in it. Nothing where there is none."""
    deadline = time.monotonic() + GONE_S
    while (NETNS / netns).exists() and (pids := ip("netns", "pids", netns).split()):
        if time.monotonic() > deadline:
            raise CommandFailed(f"the processes {', '.join(pids)} do not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    if (NETNS / netns).exists():
        ip("netns", "delete", netns)


def sweep() -> None:
    """Removes the namespaces of runs that are no more."""
    for path in NETNS.glob("narrows-*"):
        if (found := NAME.match(path.name)) and not Path(f"/proc/{found[1]}").exists():
            with suppress(CommandFailed):  # another run may be at it too
                remove(path.name)


LINKS = (("1gbit", "1ms"), ("100mbit", "20ms"), ("20mbit", "60ms"), ("1mbit", "100ms"))  # rate, delay one way
PINGS, PINGS_S = 50, 6.0
PRIORITY = -10  # of who measures: links, not what else this machine does


def quantity(**units: float) -> Callable[[str], float]:
    """Reads a number with one of these units, such as 100mbit."""

    def read(text: str) -> float:
        found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([a-z%]+)", text)
        if not found or found[2] not in units:
            raise click.BadParameter(f"{text!r} is not a number with one of {', '.join(units)}")
        return float(found[1]) * units[found[2]]

    return read


RATE = quantity(bit=1, kbit=1e3, mbit=1e6, gbit=1e9)
TIME = quantity(s=1, ms=1e-3, us=1e-6)
SHARE = quantity(**{"%": 0.01})


def measured(recorder: record.Recorder, way: Way, back: Way, seconds: float, seed: int, congestion: str) -> None:
    """One TCP stream each way, one after the other, and UDP packets there and back: one line."""
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with pair(way, back, seed, congestion) as lab:
        here, there = lab.hosts
        times = sorted(path_meter.round_trips(here, there, PINGS, PINGS_S))
        one, other = path_meter.stream(here, there, seconds), path_meter.stream(there, here, seconds)
    figures: record.Figures = {
        "there": (one.rate / 1e6, "Mbit/s of payload"),
        "back": (other.rate / 1e6, "Mbit/s of payload"),
    }
    figures |= {
        "round trip": (1e3 * statistics.median(times), "ms"),
        "of 95 %": (1e3 * times[int(0.95 * len(times))], "ms"),
    }
    figures["headers"] = (100 * (one.received / one.payload - 1), "%")
    arguments = {"seconds": seconds, "loss": way.loss, "congestion": congestion}
    recorder.add("a TCP stream", figures, seed=seed, link=record.link_of(way), arguments=arguments)


@click.command(context_settings={"show_default": True})
@click.option("--rate", type=RATE, metavar="RATE", default="100mbit", help="of IP packets: bit, kbit, mbit, gbit")
@click.option("--back-rate", type=RATE, metavar="RATE", help="from the second host to the first; as --rate by default")
@click.option("--delay", type=TIME, metavar="TIME", default="20ms", help="one way: s, ms, us")
@click.option("--jitter", type=TIME, metavar="TIME", default="0ms", help="up to so much more or less delay, in order")
@click.option("--loss", type=SHARE, metavar="SHARE", default="0%", help="of all packets, at random")
@click.option("--queue", type=int, default=0, help="bytes; 0: rate times round trip, and some for slow links")
@click.option("--seed", default=0, help="of loss and jitter")
@click.option("--congestion", default=CONGESTION, help="TCP's congestion control")
@click.option("--seconds", default=10.0, help="of a stream")
@click.option("--table", "standard", is_flag=True, help="measure " + ", ".join(map(" ".join, LINKS)))
@record.out_option("lab/netns")
@click.argument("command", nargs=-1)
def main(
    rate: float,
    back_rate: float | None,
    delay: float,
    jitter: float,
    loss: float,
    queue: int,
    seed: int,
    congestion: str,
    seconds: float,
    standard: bool,
    out: Path,
    command: tuple[str, ...],
) -> None:
    """Measure a link, or run COMMAND at one end of it: it finds LAB_ADDRESS, LAB_PEER and LAB_NETNS, the peer's namespace."""
    try:
        there = Way(rate, delay, jitter, loss, queue)
        back = replace(there, rate=rate if back_rate is None else back_rate)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if missing := available():
        raise click.ClickException(missing)
    try:
        if command:
            sys.exit(run_command(command, there, back, seed, congestion))
        ways = [(Way(RATE(rate), TIME(delay)),) * 2 for rate, delay in LINKS] if standard else [(there, back)]
        with record.Recorder("lab/netns", out) as recorder:
            for each in ways:
                measured(recorder, *each, seconds, seed, congestion)
    except (CommandFailed, ConnectionError, TimeoutError) as error:
        raise click.ClickException(str(error)) from None


def run_command(command: Sequence[str], there: Way, back: Way, seed: int, congestion: str) -> int:
    """Its exit code."""
    with pair(there, back, seed, congestion) as lab:
        here, peer = lab.hosts
        env = os.environ | {"LAB_ADDRESS": here.address, "LAB_PEER": peer.address, "LAB_NETNS": peer.netns}
        try:
            code = here.popen(command, env=env).wait()
        except OSError as error:
            raise CommandFailed(f"{command[0]}: {error.strerror}") from None
        received, sent = here.bytes()
        click.echo(f"received {received:,} B, sent {sent:,} B", err=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
