"""A Prometheus that scrapes the metrics of a run once a second, and is then asked all that docs/grafana.json asks.

    apt-get install prometheus && python bench/speed/prometheus_scrape.py  # digits, 2 workers, loopback; ends after a minute

Rules
- A scrape counts where Prometheus says `up`. The claim: every scrape, and a result for each expression.
- The run is ended with SIGTERM once there were enough scrapes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch
from lab.launch import CommandFailed

TASK = ("bench/tasks/digits.py", "--steps", "1000000")
FLAGS = ("-n", "2", "--shards", "2", "--sync", "ssp", "--compress", "topk:0.01+int8", "--checkpoint-dir", "none")
START_S = 150.0  # until somebody can be asked
SLACK_S = 60.0  # for a busy machine, beyond the seconds of the scrapes
CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs: [{job_name: narrows, static_configs: [{targets: ["127.0.0.1:%d"]}]}]
"""


def expressions() -> list[str]:
    """What the dashboard asks, of any server."""
    panels = json.loads((launch.ROOT / "docs" / "grafana.json").read_text())["panels"]
    return [target["expr"].replace("$server", ".+") for panel in panels for target in panel.get("targets", ())]


def until(done: Callable[[], Any], what: str, limit_s: float) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := done()):
        if time.monotonic() > deadline:
            raise CommandFailed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.5)
    return found


def metrics(port: int) -> bool:
    """Whether the run has made a clock."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as told:
            lines = told.read().decode().splitlines()
    except OSError:
        return False
    return any(line.startswith("narrows_clock ") and float(line.split()[1]) > 0 for line in lines)


def asked(port: int, expression: str) -> list[float]:
    """The values that Prometheus has for it now. None while it is not up, or where it knows nothing. Raises CommandFailed
    where it does not understand the expression."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as told:
            found = json.load(told)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is not ready
            return []
        raise CommandFailed(f"{expression}: {error.read().decode()}") from None
    except OSError:
        return []
    return [float(each["value"][1]) for each in found]


def told(folder: Path, scrapes: int) -> list[str]:
    """Scrape a run so often, and say what was found. Raises CommandFailed."""
    run_port, port = launch.free_ports(2)
    (folder / "prometheus.yml").write_text(CONFIG % run_port)
    run = [sys.executable, "-m", "narrows.worker.command.cli", *FLAGS, "--metrics", str(run_port), *TASK]
    prometheus = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with ExitStack() as ended, (folder / "said").open("w+") as said:

        def start(command: list[str]) -> None:
            process = subprocess.Popen(command, cwd=launch.ROOT, env=launch.environment(), stdout=said, stderr=said)
            ended.callback(launch.end, process)

        try:
            start(run)
            until(lambda: metrics(run_port), "the first clock", START_S)
            start([*prometheus, f"--web.listen-address=127.0.0.1:{port}"])
            until(lambda: asked(port, "up"), "the first scrape", START_S)
            count = "count_over_time(up[1h])"
            until(lambda: asked(port, count)[0] >= scrapes, f"{scrapes} scrapes", scrapes + SLACK_S)
        except CommandFailed as error:
            raise CommandFailed(f"{error}; last words:\n{launch.tail(said)}") from None
        (up,), (all_of,) = asked(port, "sum_over_time(up[1h])"), asked(port, count)
        (took_s,) = asked(port, "avg_over_time(scrape_duration_seconds[1h])")
        (names,) = asked(port, 'count(count by (__name__) ({__name__=~"narrows_.+"}))')
        every = expressions()
        silent = [each for each in every if not asked(port, each)]
    found = [
        f"{up:.0f} of {all_of:.0f} scrapes found the run, {1e3 * took_s:.0f} ms each; {names:.0f} names of series are ours",
        f"{len(every) - len(silent)} of {len(every)} expressions of grafana.json have a result",
    ]
    return found + [f"no result: {each}" for each in silent]


@click.command(context_settings={"show_default": True})
@click.option("--scrapes", default=60)
def main(scrapes: int) -> None:
    """Scrape a run with a real Prometheus, and print what was found."""
    if shutil.which("prometheus") is None:
        raise click.ClickException("prometheus is not installed; on Debian: apt-get install prometheus")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for line in told(Path(folder), scrapes):
                click.echo(f"- {line}")
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None
    facts = launch.facts()
    click.echo(f"\ncommit {facts['commit']}; {facts['machine']}, load {facts['load']}")


if __name__ == "__main__":
    main()
