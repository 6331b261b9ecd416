"""Shard by shard across a link: when each stream's push began and its ack arrived, and what crosses with more workers below.

    python bench/speed/shard_streams.py  # dense and top-k; a cluster of 1, 2 and 4 workers
    python bench/speed/shard_streams.py --compress dense --workers 2 --rounds 12

Rules
- A root in one city, a cluster in the other, 2 shards each, joined by a link of the lab: each shard of the cluster is
  a stream of its own to the shard above. The workers of the cluster train tasks/bytelm.py, bsp among them, ssp above.
- Nothing in the product is asked: both ends of the link are listened to (AF_PACKET, the kernel's times, one clock), TCP
  streams are put together again, and their messages decoded.
- A stream's interval is from the first byte of its push, as it leaves the cluster's interface, to the last of its ack there.
  "On the link" is from the first to the last byte of the push as they arrive at the root's interface. An overlap is what
  two intervals share: of what they cover together, and of the shorter one. One after the other would be 0. Short pushes that
  leave at once cross a link that both share one behind the other, without a pause: then the rate says that it is full.
- Bytes a clock are IP packets both ways at the cluster's interface, retransmissions, acks and heartbeats too, from the
  first push in the table to the last; those of the push are its messages'.
"""

from __future__ import annotations

import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click

from narrows.protocols import messages as m
from narrows.protocols.wire import decode

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders import wan
from lab import launch, netns
from lab.launch import CommandFailed
from lab.link import Way

SHARDS = 2
LINK = Way(100e6, 0.02)
FIRST = 3  # clocks that no table counts: connections find their rate
DEVICE = "wan0"
TRACED = 2  # workers of the run whose rounds are listed
LIMIT_S = 240.0

# Linux's numbers that the module socket does not name.
ETH_P_ALL, PACKET_OUTGOING, SO_RCVBUFFORCE, SO_TIMESTAMPNS, PACKET_STATISTICS = 3, 4, 33, 35, 6
SOL_PACKET = 263
BUFFER_BYTES = 256 << 20  # all that comes while the listening thread waits for a core
PACKET_BYTES = 1 << 16
HEADER_BYTES = 120  # of IP and TCP with all options

GREETING_BYTES, MORE, LONG, COMMAND = 64, 1, 2, 4  # ZMTP 3.1, sec. "Framing"

Result = dict[str, Any]
Interval = tuple[float, float]


class Segment(NamedTuple):
    at: float  # seconds since 1970
    size: int  # of the IP packet
    sent: bool
    ports: tuple[int, int]  # source, destination
    sequence: int
    opens: bool
    offset: int  # of what it carries, in `data`
    carried: int  # bytes
    data: bytes


class Listener:
    """Hears what passes one interface while the block lasts; `whole`: with the packets' contents, not headers alone."""

    def __init__(self, host: netns.Host, whole: bool) -> None:
        self.take = PACKET_BYTES if whole else HEADER_BYTES
        with host.inside():
            self.tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        self.tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self.tap.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.tap.bind((DEVICE, ETH_P_ALL))
        self.tap.settimeout(0.2)
        self.segments: list[Segment] = []
        self.lost = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.lost = struct.unpack("II", self.tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        self.tap.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            try:
                data, told, _, source = self.tap.recvmsg(self.take, 64)
            except TimeoutError:
                continue
            seconds, nanoseconds = struct.unpack("qq", told[0][2])
            if segment := parsed(data, seconds + nanoseconds / 1e9, source[2] == PACKET_OUTGOING):
                self.segments.append(segment)


def parsed(data: bytes, at: float, sent: bool) -> Segment | None:
    """None where it is not TCP over IPv4."""
    if data[0] >> 4 != 4 or data[9] != socket.IPPROTO_TCP:
        return None
    head, (size,) = 4 * (data[0] & 15), struct.unpack_from("!H", data, 2)
    source, destination, sequence = struct.unpack_from("!HHI", data, head)
    offset = head + 4 * (data[head + 12] >> 4)
    opens = bool(data[head + 13] & 2)
    return Segment(at, size, sent, (source, destination), sequence, opens, offset, size - offset, data)


class Stream:
    """One direction of a connection: when each of its bytes passed for the first time, and what they are."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """All with the same ports. Raises CommandFailed where one is missing."""
        opening = next(segment.sequence for segment in segments if segment.opens)
        carriers = [((s.sequence - opening - 1) % 2**32, s) for s in segments if s.carried]
        self.begins, self.times, pieces, end = list[int](), list[float](), list[bytes](), 0
        for begin, segment in sorted(carriers, key=lambda carrier: (carrier[0], carrier[1].at)):
            if begin > end:
                raise CommandFailed(f"{begin - end} bytes of a stream were not heard")
            if begin + segment.carried > end:  # else it was sent again
                self.begins.append(end)
                self.times.append(segment.at)
                pieces.append(segment.data[segment.offset + end - begin :])
                end = begin + segment.carried
        self.bytes = b"".join(pieces)

    def passed(self, begin: int, end: int) -> Interval:
        """When the first and the last of bytes [begin, end) did."""
        first, last = bisect_right(self.begins, begin) - 1, bisect_right(self.begins, end - 1) - 1
        return self.times[first], max(self.times[first : last + 1])

    def messages(self) -> Iterator[tuple[int, int, m.Message]]:
        """With the bytes [begin, end) of each."""
        at = begin = GREETING_BYTES
        frames: list[bytes] = []
        while at + 2 <= len(self.bytes):
            flags = self.bytes[at]
            body = at + (9 if flags & LONG else 2)
            end = body + int.from_bytes(self.bytes[at + 1 : body], "big")
            if end > len(self.bytes):
                return  # the connection ended within it
            if not flags & COMMAND:
                frames.append(self.bytes[body:end])
                if not flags & MORE:
                    yield begin, end, decode(frames)
                    frames = []
            at = end
            if not frames:
                begin = at


class Exchange(NamedTuple):
    """One push of one shard. Seconds since 1970."""

    begin: float  # the first byte leaves
    arrives: Interval  # at the root
    ack: float  # is here
    size: int


def exchanges(here: Sequence[Segment], there: Sequence[Segment]) -> list[dict[int, Exchange]]:
    """The exchanges of each shard, by clock; `here`: heard at the cluster, `there`: at the root."""
    flows: dict[tuple[bool, tuple[int, int]], list[Segment]] = defaultdict(list)
    for near, segments in (True, here), (False, there):
        for segment in segments:
            flows[near, segment.ports].append(segment)
    shards: dict[int, dict[int, Exchange]] = {}
    for ports in [ports for near, ports in flows if near and flows[near, ports][0].sent]:
        if not any(segment.carried for segment in flows[True, ports]) or (True, ports[::-1]) not in flows:
            continue  # nobody was there yet
        up, down = Stream(flows[True, ports]), Stream(flows[True, ports[::-1]])
        far = Stream(flows[False, ports])
        spans: dict[int, tuple[int, int]] = {}
        for begin, end, message in up.messages():
            if isinstance(message, m.Push):
                spans[message.clock] = (spans.get(message.clock, (begin, end))[0], end)
        acks: dict[int, float] = {}
        for begin, end, message in down.messages():
            if isinstance(message, m.PushAck):
                acks.setdefault(message.clock, down.passed(begin, end)[1])
        if spans:
            shards[ports[1]] = {
                clock: Exchange(up.passed(*span)[0], far.passed(*span), acks[clock], span[1] - span[0])
                for clock, span in spans.items()
                if clock in acks
            }
    return [shards[port] for port in sorted(shards)]


def overlap(intervals: Sequence[Interval]) -> tuple[float, float]:
    """The time that two intervals share, divided by what they cover together, and by the shorter one."""
    (first, second), shorter = sorted(intervals), min(end - begin for begin, end in intervals)
    shared = max(0.0, min(first[1], second[1]) - second[0])
    return shared / (max(first[1], second[1]) - first[0]), shared / shorter


def measure(spec: str, workers: int, rounds: int) -> Result:
    """One run. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as name, netns.pair(LINK) as two:
        folder, (above, below) = Path(name), two.hosts
        shards = ("--shards", str(SHARDS))
        with Listener(below, whole=True) as near, Listener(above, whole=False) as far:
            wan.serve(above, wan.PORT, [*shards, "--workers", "1", "--sync", "ssp", "--compress", spec], folder, "root")
            parent = ("--parent", f"tcp://{above.address}:{wan.PORT}")
            wan.serve(
                below, wan.PORT, [*shards, *parent, "--workers", str(workers), "--sync", "bsp"], folder, "cluster"
            )
            command = [
                sys.executable,
                "-m",
                "narrows.worker.command.cli",
                "--server",
                f"tcp://{below.address}:{wan.PORT}",
            ]
            command += ["-n", str(workers), wan.TASK, "--steps", str(FIRST + rounds + 1)]
            with (folder / "log").open("w") as log:
                process = below.popen(command, stdout=log, stderr=log, cwd=launch.ROOT)
            deadline = time.monotonic() + LIMIT_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise CommandFailed(f"a run of {workers} workers took longer than {LIMIT_S:.0f} s")
                time.sleep(0.1)
            if process.returncode != 0:
                raise CommandFailed(f"the workers failed: {(folder / 'log').read_text()[-800:]}")
    if near.lost or far.lost:
        raise CommandFailed(f"{near.lost + far.lost} packets were not heard: this machine is too busy")
    found = exchanges(near.segments, far.segments)
    if len(found) != SHARDS:
        raise CommandFailed(f"{len(found)} streams pushed, not {SHARDS}")
    clocks = [clock for clock in range(FIRST, FIRST + rounds + 1) if all(clock in own for own in found)]
    begins = [min(own[clock].begin for own in found) for clock in clocks]
    between = [s for s in near.segments if begins[0] <= s.at < begins[-1]]
    lines: list[Result] = []
    for clock, begin in zip(clocks[:-1], begins, strict=False):
        own = [each[clock] for each in found]
        first, last = min(e.arrives[0] for e in own), max(e.arrives[1] for e in own)
        arrived = sum(s.size for s in far.segments if not s.sent and first < s.at <= last)
        lines.append(
            {
                "clock": clock,
                "ms": [[1e3 * (t - begin) for t in (e.begin, *e.arrives, e.ack)] for e in own],
                "push_bytes": sum(e.size for e in own),
                "overlap": overlap([(e.begin, e.ack) for e in own]),
                "on_link": overlap([e.arrives for e in own]),
                "rate": 8e-6 * arrived / (last - first),
                "together": 1e3 * (max(e.ack for e in own) - begin),
                "in_turn": 1e3 * sum(e.ack - e.begin for e in own),
            }
        )
    return {
        "compress": spec,
        "workers": workers,
        "rounds": lines,
        "clock_ms": 1e3 * statistics.median(b - a for a, b in pairwise(begins)),
        "push_bytes": statistics.fmean(line["push_bytes"] for line in lines),
        "up": sum(s.size for s in between if s.sent) / len(lines),
        "down": sum(s.size for s in between if not s.sent) / len(lines),
    }


def trace(result: Result) -> str:
    """A line a round."""
    shard = "shard {0} push begins | first byte at the root | last byte | ack here"
    lines = [
        f"{result['compress']}, {result['workers']} workers: ms since the first push of the clock left",
        "",
        f"| clock | {' | '.join(shard.format(i) for i in range(SHARDS))} | overlap, push to ack | on the link | Mbit/s |",
        "|---" * (4 + 4 * SHARDS) + "|",
    ]
    for line in result["rounds"]:
        times = [f"{value:.1f}" for own in line["ms"] for value in own]
        shares = ["{:.2f}, {:.2f}".format(*line[name]) for name in ("overlap", "on_link")]
        lines.append(f"| {' | '.join([str(line['clock']), *times, *shares, format(line['rate'], '.0f')])} |")
    rounds = result["rounds"]
    overlaps = ("{:.2f}, {:.2f}".format(*(statistics.median(line[name][i] for line in rounds) for i in range(2)))
                for name in ("overlap", "on_link"))  # fmt: skip
    rate, together, in_turn = (
        statistics.median(line[name] for line in rounds) for name in ("rate", "together", "in_turn")
    )
    lines += [
        "",
        "medians: overlap {} of both, of the shorter; on the link {}; ".format(*overlaps)
        + f"{rate:.0f} Mbit/s of IP packets while they arrive; together {together:.0f} ms, one after the other {in_turn:.0f}",
        "",
    ]
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """Bytes between the two cities."""
    lines = [
        "| compress above | workers of the cluster | clocks | bytes of the two pushes a clock | to 1 worker "
        "| kB up, down a clock at the interface | ms a clock |",
        "|---" * 7 + "|",
    ]
    for result in results:
        ones = [r["push_bytes"] for r in results if (r["compress"], r["workers"]) == (result["compress"], 1)]
        ratio = f"{result['push_bytes'] / ones[0]:.4f}" if ones else "-"
        cells = [result["compress"], str(result["workers"]), str(len(result["rounds"])), f"{result['push_bytes']:,.0f}"]
        cells += [ratio, f"{result['up'] / 1e3:,.1f}, {result['down'] / 1e3:,.1f}", f"{result['clock_ms']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--compress", "specs", default="topk:0.05+int8,dense", help="SPECs above, comma-separated")
@click.option("--workers", "counts", default="1,2,4", help="of the cluster, comma-separated")
@click.option("--rounds", default=12, help="clocks in the tables")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "streams.json")
def main(specs: str, counts: str, rounds: int, out: Path) -> None:
    """Show that the shards of a cluster push side by side, and that its workers share what crosses the link."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if missing := netns.available():
        raise click.ClickException(missing)
    results: list[Result] = []
    for spec in specs.split(","):
        for workers in map(int, counts.split(",")):
            try:
                results.append(measure(spec, workers, rounds))
            except (CommandFailed, OSError) as error:
                raise click.ClickException(f"{spec}, {workers} workers: {error}") from None
            facts = launch.facts()
            launch.save(out, facts | {"link": vars(LINK), "runs": results})
            if workers == TRACED:
                click.echo(trace(results[-1]))
    click.echo(table(results))
    click.echo(
        f"\n{LINK.rate / 1e6:g} Mbit/s and {1e3 * LINK.delay_s:g} ms each way, {SHARDS} shards; "
        "commit {commit}; {machine}, load {load}; torch {torch}; {date}".format(**facts)
    )


if __name__ == "__main__":
    main()
