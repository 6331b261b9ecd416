"""ps-probe measures networks of the lab. The bench compares what it finds with what was set.

    python bench/planning/probe_accuracy.py            # three hosts, then eleven: at most 20 s a round
    python bench/planning/probe_accuracy.py --hosts 3  # three alone

Rules
- A path leads over two links: its delay is the sum of both, its rate that of the narrower one, less the headers of TCP.
- A host runs ps-probe as a user would: the first directs, the others join, all without keys.
- One stream may not fill a path that loses packets, the less the longer its round trip.
  There the faster of one stream and four is compared.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from narrows.ps.probe.flows import stream_rate

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, netns, record
from lab.link import MTU, Way

PAYLOAD = (MTU - 52) / MTU  # IP and TCP headers, with timestamps
PORT = 5600
SECONDS = 20.0
WITHIN, WITHIN_S = 0.10, 0.002
STARTS_S = 60.0


class Access(NamedTuple):
    """The link of a host to the switch: bit/s towards it and back, delay one way, loss of both."""

    up: float
    down: float
    delay_s: float
    loss: float = 0.0

    @property
    def ways(self) -> tuple[Way, Way]:
        return Way(self.up, self.delay_s, loss=self.loss), Way(self.down, self.delay_s, loss=self.loss)


MB = 1e6
NETWORKS: dict[int, tuple[Access, ...]] = {
    3: (
        Access(1000 * MB, 1000 * MB, 0.001),
        Access(100 * MB, 20 * MB, 0.02),  # asymmetric
        Access(2 * MB, 2 * MB, 0.1),
    ),
    11: (
        Access(1000 * MB, 1000 * MB, 0.001),
        Access(200 * MB, 200 * MB, 0.001),
        Access(100 * MB, 20 * MB, 0.005),  # asymmetric
        Access(10 * MB, 10 * MB, 0.002, 0.001),  # lossy
        Access(2 * MB, 2 * MB, 0.02),
        Access(100 * MB, 100 * MB, 0.01),
        Access(50 * MB, 50 * MB, 0.02),
        Access(20 * MB, 20 * MB, 0.03),
        Access(10 * MB, 10 * MB, 0.05),
        Access(5 * MB, 5 * MB, 0.1),
        Access(2 * MB, 2 * MB, 0.1),
    ),
}


def probe(network: Sequence[Access], seconds: float, machines: Sequence[int] = ()) -> tuple[dict[str, Any], str, float]:
    """Its network.json, what the director said, and the seconds of all. `machines`: of each host, which share its link.
    Raises CommandFailed."""
    with netns.star([each.ways[0] for each in network]) as star, tempfile.TemporaryDirectory() as folder:
        for link, each in zip(star.links, network, strict=True):
            link.set(*each.ways)
        counts = machines or [1] * len(network)
        first, *others = [host for host, count in zip(star.hosts, counts, strict=False) for _ in range(count)]
        command = [sys.executable, "-m", "narrows.ps.command.planning.probe", "--insecure"]
        said, out = Path(folder) / "said", Path(folder) / "network.json"
        flags = ["--bind", f"tcp://{first.address}:{PORT}", "--machines", str(sum(counts)), "--name", "host-0"]
        flags += ["--out", str(out), "--seconds", str(seconds)]
        begin = time.monotonic()
        with said.open("w") as file:
            director = first.popen([*command, *flags], stdout=file, stderr=file)
        for number, host in enumerate(others, 1):
            join = ["--join", f"tcp://{first.address}:{PORT}", "--name", f"host-{number}"]
            host.popen([*command, *join], stderr=None)
        code = director.wait(STARTS_S + seconds * 2 * sum(counts))
        text = said.read_text()
        if code != 0:
            raise launch.CommandFailed(f"ps-probe ended with {code}: {text}")
        return json.loads(out.read_text()), text, time.monotonic() - begin


class Row(NamedTuple):
    """A path: what was set, what was found. `loss` of both links."""

    sender: int
    receiver: int
    rate: float
    found_rate: float
    four: float
    delay_s: float
    found_delay_s: float
    loss: float
    found_loss: float

    @property
    def off(self) -> float:
        return (max(self.four, self.found_rate) if self.loss else self.found_rate) / self.rate - 1

    @property
    def right(self) -> bool:
        return abs(self.off) <= WITHIN and abs(self.found_delay_s - self.delay_s) <= WITHIN_S


def rows(network: tuple[Access, ...], document: dict[str, Any]) -> Iterator[Row]:
    """Yield one row for each path."""
    for link in document["links"]:
        i, j = (int(re.sub(r"\D", "", link[end])) for end in ("from", "to"))
        a, b = network[i], network[j]
        alone = max((each for each in link["flows"] if each["streams"] == 1 and not each["both_ways"]), key=stream_rate)
        (four,) = (each for each in link["flows"] if each["streams"] == 4)
        rate = min(a.up, b.down) * PAYLOAD
        loss = 1 - (1 - a.loss) * (1 - b.loss)
        yield Row(i, j, rate, stream_rate(alone), stream_rate(four), a.delay_s + b.delay_s, link["delay_s"], loss,
                  link["retransmitted"])  # fmt: skip


def measured(recorder: record.Recorder, hosts: int, seconds: float) -> None:
    """One line: how many of the ways were found as they are. Those that were not are told. Raises CommandFailed."""
    document, said, took_s = probe(NETWORKS[hosts], seconds)
    found = sorted(rows(NETWORKS[hosts], document))
    for row in (each for each in found if not each.right):
        click.echo(
            f"from {row.sender} to {row.receiver}: {row.found_rate / MB:.4g} of {row.rate / MB:.4g} Mbit/s (four streams "
            f"{row.four / MB:.4g}), {1e3 * row.found_delay_s:.1f} of {1e3 * row.delay_s:.1f} ms, loss {row.loss:.2%}, "
            f"retransmitted {row.found_loss:.2%}"
        )
    click.echo("\n".join(line for line in said.splitlines() if "pairs" in line))
    figures: record.Figures = {"right": (sum(row.right for row in found), "ways"), "all": (len(found), "ways")}
    figures["worst rate"] = (100 * max(abs(row.off) for row in found), "% off")
    figures["worst delay"] = (1e3 * max(abs(row.found_delay_s - row.delay_s) for row in found), "ms off")
    note = f"right: within {WITHIN:.0%} of the rate and {1e3 * WITHIN_S:.0f} ms of the delay"
    arguments = {"seconds of a round": seconds}
    recorder.add(f"{hosts} hosts", figures | {"time": (took_s, "s")}, arguments=arguments, note=note)


@click.command(context_settings={"show_default": True})
@click.option(
    "--hosts", "chosen", type=click.Choice([*map(str, NETWORKS)]), multiple=True, default=[*map(str, NETWORKS)]
)
@click.option("--seconds", default=SECONDS, help="at most, of a round")
@record.out_option("planning/probe_accuracy")
def main(chosen: tuple[str, ...], seconds: float, out: Path) -> None:
    """Run ps-probe in networks of the lab, and show what it finds."""
    if missing := netns.available():
        raise click.ClickException(missing)
    try:
        with record.Recorder("planning/probe_accuracy", out) as recorder:
            for hosts in chosen:
                measured(recorder, int(hosts), seconds)
    except launch.CommandFailed as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
