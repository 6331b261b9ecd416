"""Gossip of four workers, each in a network of its own, from which it reaches the host of the server alone, as behind a NAT.

    python bench/speed/relay.py                    # both ways through a relay, beside direct connections: loss, step, bytes
    python bench/speed/relay.py --rows 'relay*' --steps 60

Rules
- Each worker trains tasks/bytelm.py with keys. All rows take the same links, to the same switch: where workers meet directly,
  the switch forwards between them; else it does not, and the server, or the relay, stands on it.
- "models": different final models of the four workers, by SHA-256. 1 is one model.
- "relayed": what the relay's own process has counted. "sent": by a worker, the mean, the kernel's count at its interface.
- "step" is the slowest worker's median. All processes share the cores of this machine: a relay of its own would not.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way

WORKERS, PORT, RELAY_PORT = 4, 5555, 5556
DIRECT, AT_SERVER, ALONE = "direct", "relay at the server's one port", "relay that stands alone"
ROWS = (DIRECT, AT_SERVER, ALONE)
WAY = Way(100e6, 0.01)
LIMIT_S = 400.0
COUNTED = re.compile(r"([\d.,]+) MB went through the relay")


def worker(args: list[str]) -> None:
    """Train as one worker, and print which model it ended with."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))
    import bytelm

    measured = bytelm.validation_loss

    def told(model: Any, *more: Any) -> float:
        digest = hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters()))
        print(f"model {digest.hexdigest()}", flush=True)
        return float(measured(model, *more))

    vars(bytelm)["validation_loss"] = told
    bytelm.main(bytelm.arguments(args))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "narrows.ps.command.cli", *words]


class Place:
    """The hosts of a row, with what runs there. Raises CommandFailed."""

    def __init__(self, stack: ExitStack, row: str) -> None:
        self.row, self.folder = row, Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = netns.star if row == DIRECT else netns.apart
        *self.hosts, self.hub = stack.enter_context(made([WAY] * WORKERS)).hosts
        self.logs = {name: (self.folder / name).open("w+") for name in ("server", "relay", *map(str, range(WORKERS)))}
        for log in self.logs.values():
            stack.callback(log.close)

    def start(self, host: netns.Host, name: str, words: list[str]) -> subprocess.Popen[Any]:
        log = self.logs[name]
        return host.popen(words, stdout=log, stderr=log, cwd=self.folder)

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def serve(self) -> subprocess.Popen[Any] | None:
        """Start the server, and the relay of its own if the row has one, which is returned."""
        launch.run(command("keys", "init", str(self.folder / "K")), LIMIT_S)
        launch.run(command("keys", "add", "worker", "--keys", str(self.folder / "K")), LIMIT_S)
        relay, more = None, ["--one-port"] if self.row == AT_SERVER else []
        if self.row == ALONE:
            words = command("relay", "--bind", f"tcp://0.0.0.0:{RELAY_PORT}", "--key", "relay.key")
            relay = self.start(self.hub, "relay", words)
            launch.until(lambda: "relays at" in self.said("relay"), "the start of the relay")
            more = ["--relay-at", f"tcp://{self.hub.address}:{RELAY_PORT}", "--relay-key", "relay.key"]
        flags = ["--sync", "gossip", "--compress", "topk:0.11+sign", "--workers", str(WORKERS), "--keys", "K", *more]
        words = launch.ps_serve(f"0.0.0.0:{PORT}", *flags, "--record", "record", "--ready-file", "ready")
        self.start(self.hub, "server", words)
        launch.until((self.folder / "ready").exists, "the start of the server")
        return relay

    def train(self, task: list[str]) -> list[subprocess.Popen[Any]]:
        words = ["--server", f"tcp://{self.hub.address}:{PORT}", "--key", "K/worker.key"]
        words += [*([] if self.row == DIRECT else ["--relay"]), str(Path(__file__).resolve()), "worker", *task]
        return [self.start(host, str(rank), launch.ps_worker(*words)) for rank, host in enumerate(self.hosts)]

    def relayed(self, relay: subprocess.Popen[Any] | None) -> float:
        """Return the bytes that the relay has counted."""
        if relay is not None:
            relay.send_signal(signal.SIGINT)
            relay.wait(launch.TERMINATE_S)
            return float(COUNTED.findall(self.said("relay"))[-1].replace(",", "")) * 1e6
        events = [json.loads(line) for line in (self.folder / "record").read_text().splitlines()]
        return float(max((event["bytes"] for event in events if event["event"] == "relay"), default=0))


def measure(row: str, task: list[str]) -> record.Figures:
    """Run a row. Raises CommandFailed."""
    with ExitStack() as stack:
        place = Place(stack, row)
        try:
            relay = place.serve()
            processes = place.train(task)
            deadline = time.monotonic() + LIMIT_S
            for rank, process in enumerate(processes):
                if process.wait(max(1.0, deadline - time.monotonic())):
                    raise CommandFailed(f"worker {rank}: {place.said(str(rank))[-800:]}")
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            raise CommandFailed(f"{error}\n{place.said('server')[-800:]}\n{place.said('0')[-800:]}") from None
        said = [place.said(str(rank)) for rank in range(WORKERS)]
        models = {re.findall(r"^model (\w+)", each, re.MULTILINE)[-1] for each in said}
        losses = [float(re.findall(r"validation loss ([\d.]+)", each)[-1]) for each in said]
        steps = [float(re.findall(r"median step ([\d.]+) s", each)[-1]) for each in said]
        sent = statistics.mean(host.bytes()[1] for host in place.hosts)
        return {
            "loss": (statistics.mean(losses), "nats a byte"),
            "models": (len(models), ""),
            "step": (1e3 * max(steps), "ms"),
            "relayed": (place.relayed(relay) / 1e6, "MB"),
            "sent": (sent / 1e6, "MB"),
        }


@click.command(context_settings={"show_default": True})
@record.rows_option(ROWS)
@click.option("--steps", default=200, help="of a run")
@click.option("--seed", default=0, help="of the task")
@record.out_option("speed/relay")
def main(pattern: str, steps: int, seed: int, out: Path) -> None:
    """Measure gossip through a relay beside direct connections."""
    if missing := netns.available():
        raise click.ClickException(missing)
    recorder = record.Recorder("speed/relay", out)
    found: dict[str, record.Figures] = {}

    def measured(name: str) -> None:
        found[name] = measure(name, ["--steps", str(steps), "--seed", str(seed)])
        recorder.add(name, found[name], seed=seed, link=record.link_of(WAY), arguments={"steps": steps}, beside=DIRECT)
        if name != DIRECT and DIRECT in found:
            ratio = {
                each: (found[name][each][0] or 0.0) / (found[DIRECT][each][0] or 1.0)
                for each in ("loss", "step", "sent")
            }
            click.echo(f"{name}: " + ", ".join(f"{each} {value:.4f} of direct" for each, value in ratio.items()))

    record.measure_rows(recorder, ROWS, pattern, measured)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2:])
    else:
        main()
