"""Two cities, each behind a firewall that lets one port in: a step through it, beside one through a port for each shard.

    python bench/faults/firewalls.py                # bsp, ssp and ssh -L, at 100 Mbit/s and 10 ms
    python bench/faults/firewalls.py --rows bsp --rounds 1
    python bench/faults/firewalls.py --rows ssh     # the one port through ssh -L; needs sshd

Rules
- Each city is a host of the lab (lab/netns.py) with rules of nft. It drops all that comes in but the ports of the way, and
  answers to what it has dialled. A run begins with a proof: a socket listens at each of PROBED ports, and the other city
  reaches those alone that are let in.
- The first city has the server: keys, shards, and a page at the port of the shards, or with many ports at one of its own. The
  second has its standby. Each has a worker, which dials the server by the address of its city. A worker pushes a model of
  `--size` MiB and computes nothing: a step is the way of its bytes. Under ssp it waits PACE_S in place of a gradient.
- Both ways have cities and a link of their own in one lab, and rounds of steps in turn: the other way rests meanwhile.
- "step" is the median of the slower worker's steps in a round, all of which wait for the standby's acknowledgement.
- After the last round the server is killed, with all its processes. "turn" is the longest step after that: until the workers
  train at the standby. Before that a stranger in the other city tries the one port: a ps-worker without a key, and CONNECT
  to other places.
- "dropped" counts the packets that the firewalls have dropped while the run went on. "CPU of the port" is what the processes
  of the one port took, of the server and of its standby.
- Through `ssh -L` there is no standby, for members would not find it there; the firewall lets in ssh alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from faults.chaos import children_of
from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way
from lab.netns import Host

from narrows.protocols.runtime.network import key_files
from narrows.protocols.runtime.network.socks_dialler import asked

HERE = Path(__file__).resolve()
PORT, SHARDS, SSH_PORT = 5555, 2, 2222
PAGE_PORT = PORT + SHARDS  # of a page that has a port of its own
PROBED = (*range(PORT, PORT + 6), SSH_PORT, 40_000)
PROBE_S = 0.5  # within which an open port answers
WARM, AFTER = 3, 4  # steps before the first round, and after the kill
PACE_S = 0.1
RUN_S, PAUSE_S = 240.0, 900.0
REFUSED = 4  # exit code of a worker without a key
MIB = 1 << 20
LIMIT = 1.03
MANY, ONE, SSH = "many ports", "one port", "ssh -L to one port"
ROWS = {
    "bsp": ("--sync", "bsp", "--push", "update"),
    "ssp topk:0.11+sign": ("--sync", "ssp", "--compress", "topk:0.11+sign"),
    "ssh": ("--sync", "bsp", "--push", "update"),
}
WAYS = {name: (ONE, SSH) if name == "ssh" else (MANY, ONE) for name in ROWS}
RULES = """
table inet narrows {
    counter dropped { }
    chain input {
        type filter hook input priority 0; policy drop;
        iif "lo" accept
        ct state established,related accept
        %s
        counter name "dropped"
    }
}
"""


def available() -> str:
    """Return what is missing here, one sentence; "" for nothing."""
    lacks = "" if shutil.which("nft") else "the firewalls need the command nft (nftables)"
    return netns.available() or lacks


# Firewalls.


def fortify(host: Host, ports: Collection[int]) -> None:
    """Let only these ports in, from now on. Raises CommandFailed."""
    with tempfile.NamedTemporaryFile("w", suffix=".nft") as file:
        file.write(RULES % (f"tcp dport {{ {', '.join(map(str, ports))} }} accept" if ports else ""))
        file.flush()
        host.run(["nft", "-f", file.name], launch.TERMINATE_S)


def dropped(host: Host) -> int:
    """Return the number of packets that its firewall has dropped."""
    found = re.search(
        r"packets (\d+)", host.run(["nft", "list", "counter", "inet", "narrows", "dropped"], launch.TERMINATE_S)
    )
    assert found is not None
    return int(found[1])


def reachable(host: Host, other: Host, ports: Collection[int]) -> set[int]:
    """Return the ports of `host`, with a socket that listens at each, that `other` reaches."""
    listening, found = [], set[int]()
    try:
        for port in ports:
            listening.append(made := host.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host.address, port))
            made.listen()
        for port in ports:
            with other.socket() as line, suppress(TimeoutError):
                line.settimeout(PROBE_S)
                line.connect((host.address, port))
                found.add(port)
    finally:
        for each in listening:
            each.close()
    return found


def prove(hosts: Sequence[Host], opened: Sequence[Collection[int]]) -> None:
    """Raise CommandFailed unless each host lets in its ports alone."""
    for host, other, ports in zip(hosts, hosts[::-1], opened, strict=True):
        if (found := reachable(host, other, PROBED)) != set(ports):
            raise CommandFailed(f"the firewall lets in {sorted(found)} of {PROBED}, not {sorted(ports)}")


# Processes.


class Cities:
    """A run in two cities, by one way.

    Args:
        hosts: the cities.
        folder: of its files.
        way: MANY, ONE or SSH.
        stands_by: the second city has a standby.
        flags: of the server.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, way: str, stands_by: bool, flags: tuple[str, ...]) -> None:
        self.hosts, self.folder, self.way, self.stands_by, self.flags = hosts, folder, way, stands_by, flags
        self.port = SSH_PORT if way == SSH else PORT
        self.before = 0  # packets that were dropped in the proof
        self.servers: list[subprocess.Popen[Any]] = []
        self.workers: list[subprocess.Popen[Any]] = []
        self.moved: list[tuple[int, int]] = []  # bytes into and out of the first city, by round
        self.busy: list[float] = []  # seconds of CPU that the processes of the one port took, by round

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def start(self, host: Host, name: str, command: Sequence[str]) -> subprocess.Popen[Any]:
        with (self.folder / f"{name}.log").open("w") as log:
            return host.popen(command, stdout=log, stderr=log, cwd=self.folder)

    def until(self, done: Callable[[], Any], what: str, limit_s: float = RUN_S) -> None:
        """Wait. Raises CommandFailed with the last words of all."""
        try:
            launch.until(done, what, limit_s)
        except TimeoutError as error:
            raise CommandFailed(f"{self.way}: {error}\n{self.last_words()}") from None

    def last_words(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def both(self, name: str) -> Callable[[], bool]:
        """True once both workers have written a file of this name."""
        return lambda: all((self.folder / f"{name}-{number}").exists() for number in range(2))

    def serve(self, host: Host, name: str, bind: str, *words: str) -> None:
        ready = self.folder / f"{name}.ready"
        more = ("--keys", str(self.folder / "KEYS"), *(() if self.way == MANY else ("--one-port",)))
        process = self.start(host, name, launch.ps_serve(bind, *more, "--ready-file", str(ready), *words))
        self.servers.append(process)
        self.until(lambda: ready.exists() or process.poll() is not None, f"the start of {name}", launch.SERVER_START_S)
        if process.poll() is not None:
            raise CommandFailed(f"{name} did not start: {self.log(name)[-1500:]}")

    def begin(self, mib: float, rounds: int, steps: int) -> None:
        """Shut the firewalls, prove it, start all, and make the first steps. Raises CommandFailed."""
        here, there = self.hosts
        page = PORT if self.way == ONE else PAGE_PORT
        let_in = [self.port] if self.way != MANY else [*range(PORT, PORT + SHARDS), PAGE_PORT]
        opened = (let_in, let_in if self.stands_by else [])
        for host, ports in zip(self.hosts, opened, strict=True):
            fortify(host, ports)
        prove(self.hosts, opened)
        self.before = sum(map(dropped, self.hosts))
        key_files.make(str(self.folder / "KEYS"))
        address = "127.0.0.1" if self.way == SSH else here.address  # the tunnel begins at that of the second city
        if self.way == SSH:
            self.tunnel()
        words = ("--shards", str(SHARDS), "--workers", "2", *self.flags)
        if self.stands_by:
            words += ("--replicas", "1", "--dashboard", f"{here.address}:{page}")
        self.serve(here, "server", f"{address}:{PORT}", *words)
        if self.stands_by:
            self.serve(there, "standby", f"{there.address}:{PORT}", "--standby", f"tcp://{here.address}:{PORT}")
        for number, host in enumerate(self.hosts):
            key = key_files.add(str(self.folder / "KEYS"), f"city{number}", "worker")
            task = {"number": number, "mib": mib, "rounds": rounds, "steps": steps, "after": AFTER * self.stands_by}
            task["pace"] = PACE_S if "ssp" in self.flags else 0.0
            script = [
                str(HERE),
                "worker",
                *(word for name, value in task.items() for word in (f"--{name}", str(value))),
            ]
            command = launch.ps_worker("--server", f"tcp://{address}:{PORT}", "--key", str(key), *script)
            self.workers.append(self.start(host, f"worker{number}", command))
        self.until(self.both("ready0"), "the first steps")
        if self.stands_by:
            self.until(lambda: "stands by: it has all" in self.log("server"), "the standby's copy")
            read_page(there, f"{here.address}:{page}")

    def round(self, number: int) -> None:
        """Make the steps of a round. Raises CommandFailed."""
        self.until(self.both(f"ready{number}"), "the round before")
        bytes_before, busy_before = self.hosts[0].bytes(), self.relays_s()
        (self.folder / f"go{number}").touch()
        self.until(self.both(f"done{number}"), "the steps")
        into, out = (after - before for before, after in zip(bytes_before, self.hosts[0].bytes(), strict=True))
        self.moved.append((into, out))
        self.busy.append(self.relays_s() - busy_before)

    def relays_s(self) -> float:
        """Return the seconds of CPU that the processes of the one port have taken."""
        ticks = 0
        for pid in (pid for each in self.servers for pid in children_of(each.pid)):
            with suppress(OSError):
                name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                if name.endswith("(ps-one-port"):
                    ticks += sum(map(int, fields.split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> dict[str, Any]:
        """Try the port as a stranger, kill the server if it has a standby, and end. Return what the workers measured.

        Raises:
            CommandFailed: a stranger was let in, or a process failed.
        """
        if self.stands_by and self.way == ONE:
            try_as_stranger(self)
        if self.stands_by:
            kill(self.servers.pop(0))
        (self.folder / "killed").touch()
        processes = (*self.workers, *self.servers)
        self.until(lambda: all(each.poll() is not None for each in processes), "the end")
        codes = [each.returncode for each in processes]
        if any(codes) or (self.stands_by and "serves in the place of" not in self.log("standby")):
            raise CommandFailed(f"{self.way}: exit codes {codes}\n{self.last_words()}")
        told = [json.loads((self.folder / f"times{number}").read_text()) for number in range(2)]
        times = [[each["rounds"][number] for each in told] for number in range(len(self.moved))]
        turn = max(max(each["after"]) for each in told)
        return {"times": times, "turn": turn, "dropped": sum(map(dropped, self.hosts)) - self.before}

    def tunnel(self) -> None:
        """Start sshd in the first city, with keys of its own, and `ssh -L` in the second."""
        here, there = self.hosts
        host_key, key, allowed, known = (str(self.folder / name) for name in ("host", "user", "user.pub", "known"))
        for path in (host_key, key):
            launch.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], launch.TERMINATE_S)
        lines = [f"Port {SSH_PORT}", f"ListenAddress {here.address}", f"HostKey {host_key}", f"AuthorizedKeysFile {allowed}",
                 "StrictModes no", "UsePAM no", "PermitRootLogin yes", "PasswordAuthentication no", "PidFile none"]  # fmt: skip
        (self.folder / "sshd").write_text("\n".join(lines) + "\n")
        self.start(here, "sshd", [shutil.which("sshd") or "sshd", "-D", "-e", "-f", str(self.folder / "sshd")])
        self.until(lambda: "listening on" in self.log("sshd"), "sshd")
        options = [
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            f"UserKnownHostsFile={known}",
            "-i",
            key,
            "-p",
            str(SSH_PORT),
        ]
        self.start(there, "ssh", ["ssh", "-N", *options, "-L", f"{PORT}:127.0.0.1:{PORT}", f"root@{here.address}"])


def try_as_stranger(cities: Cities) -> None:
    """Try the one port from the other city, without a key. Raises CommandFailed where it is let in."""
    here, there = cities.hosts
    for name in (f"shard-{SHARDS}", "127.0.0.1", here.address):
        with there.socket() as line:
            line.settimeout(launch.TERMINATE_S)
            line.connect((here.address, PORT))
            try:
                asked(line, name)
            except ConnectionError:
                continue
            raise CommandFailed(f"the one port leads a stranger to {name}")
    words = launch.ps_worker("--server", f"tcp://{here.address}:{PORT}", str(HERE), "worker")
    if (code := cities.start(there, "stranger", words).wait(launch.TERMINATE_S)) != REFUSED:
        raise CommandFailed(f"a stranger ended with exit code {code}: {cities.log('stranger')[-1500:]}")


def read_page(host: Host, address: str) -> None:
    """Read the page from a host. Raises CommandFailed."""
    with host.inside(), urllib.request.urlopen(f"http://{address}/frame.json", timeout=launch.TERMINATE_S) as answer:
        if b"worker" not in answer.read():
            raise CommandFailed("the page shows no worker")


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a ps-serve and all its processes, as if its machine lost power."""
    process.send_signal(signal.SIGSTOP)  # else it would start them again
    for pid in (*children_of(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def measure(name: str, link: Way, rounds: int, steps: int, mib: float) -> list[tuple[str, record.Figures]]:
    """Run both ways of a row in turn. Return the figures of each round. Raises CommandFailed."""
    found: list[tuple[str, record.Figures]] = []
    with ExitStack() as stack, netns.Lab() as lab:  # the folders go last
        runs = list[Cities]()
        for way in WAYS[name]:
            hosts = here, there = lab.host(), lab.host()
            lab.join(here, there, link)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            runs.append(Cities(hosts, folder, way, name != "ssh", ROWS[name]))
            runs[-1].begin(mib, rounds, steps)
        for number in range(rounds):
            for run in runs if number % 2 == 0 else runs[::-1]:
                run.round(number)
        for run in runs:
            told = run.end()
            for number, times in enumerate(told["times"]):
                figures: record.Figures = {"step": (1e3 * max(map(statistics.median, times)), "ms")}
                figures["mean step"] = (1e3 * max(map(statistics.fmean, times)), "ms")
                figures |= {f"{what} the server's city": (size / steps / 1e3, "kB a step") for what, size in
                            zip(("into", "out of"), run.moved[number], strict=True)}  # fmt: skip
                busy = None if run.way == MANY else 1e3 * run.busy[number] / steps
                figures |= {"CPU of the port": (busy, "ms a step"), "dropped": (told["dropped"], "packets")}
                figures |= {"turn": (told["turn"], "s")} if run.stands_by else {}
                found.append((run.way, figures))
    return found


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.option("--rounds", default=5, help="of each way, in turn")
@click.option("--steps", default=8, help="of a round")
@click.option("--size", "mib", default=4.0, help="MiB of float32 parameters")
@click.option("--rate", type=netns.RATE, metavar="RATE", default="100mbit", help="of the link")
@click.option("--delay", type=netns.TIME, metavar="TIME", default="10ms", help="one way")
@click.option("--limit", default=LIMIT, help="of the median step through one port, over that through many")
@record.out_option("faults/firewalls")
@record.rows_option(ROWS)
@click.pass_context
def main(
    context: click.Context,
    rounds: int,
    steps: int,
    mib: float,
    rate: float,
    delay: float,
    limit: float,
    out: Path,
    pattern: str,
) -> None:
    """Train through firewalls that let one port in."""
    if context.invoked_subcommand:
        return
    if missing := available():
        raise click.ClickException(missing)
    os.setpriority(os.PRIO_PROCESS, 0, netns.PRIORITY)
    link, beyond = Way(rate, delay), list[str]()
    recorder = record.Recorder("faults/firewalls", out)

    def row(name: str) -> None:
        if name == "ssh" and not shutil.which("sshd"):
            return click.echo("SKIPPED ssh: there is no sshd", err=True)
        first, second = WAYS[name]
        took: dict[str, list[float]] = {first: [], second: []}
        table = "without a standby" if name == "ssh" else f"{name}, with a standby"
        arguments: dict[str, record.Scalar] = {"mib": mib, "steps": steps, "shards": SHARDS}
        for way, figures in measure(name, link, rounds, steps, mib):
            took[way].append(figures["step"][0] or 0.0)
            recorder.add(way, figures, table=table, beside=first, link=record.link_of(link), arguments=arguments)
        medians = {way: statistics.median(each) for way, each in took.items()}
        ratio = medians[second] / medians[first]
        each = ", ".join(f"{after / before:.4f}" for before, after in zip(*took.values(), strict=True))
        figures_of = ", ".join(f"{way} {median:.1f} ms" for way, median in medians.items())
        click.echo(f"{name}: {figures_of}: {ratio:.4f} (rounds: {each})")
        if name != "ssh" and ratio > limit:
            beyond.append(f"{name}: a step through one port takes {ratio:.4f} of one through many, over {limit}")

    record.measure_rows(recorder, ROWS, pattern, row)
    if beyond:
        raise click.ClickException("; ".join(beyond))


@main.command(hidden=True)
@click.option("--number", default=0)
@click.option("--mib", default=0.1)
@click.option("--rounds", default=0)
@click.option("--steps", default=0)
@click.option("--after", default=0)
@click.option("--pace", default=0.0)
def worker(number: int, mib: float, rounds: int, steps: int, after: int, pace: float) -> None:
    """One worker, under ps-worker. It waits for the bench before each round, and before the steps after the kill."""
    import torch
    from torch import nn

    from narrows.worker import DistributedOptimizer

    model = nn.ParameterList([nn.Parameter(torch.zeros(int(mib * MIB / 16))) for _ in range(4)])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    generator = torch.Generator().manual_seed(number)
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape, generator=generator)

    def stepped() -> float:
        began = time.perf_counter()
        time.sleep(pace)
        optimizer.step()
        return time.perf_counter() - began

    times: dict[str, list[Any]] = {"rounds": [], "after": [0.0]}
    for _ in range(WARM):
        stepped()
    for turn in range(rounds):
        Path(f"ready{turn}-{number}").touch()
        launch.until(Path(f"go{turn}").exists, "the bench", PAUSE_S)
        times["rounds"].append([stepped() for _ in range(steps)])
        Path(f"done{turn}-{number}").touch()
    if after:
        launch.until(Path("killed").exists, "the bench", PAUSE_S)
        times["after"] = [stepped() for _ in range(after)]
    optimizer.finish()
    Path(f"times{number}").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
