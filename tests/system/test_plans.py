"""Runs of two levels and of a guest from one plan.json, as a user starts them: two commands for each host, all on loopback."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kit.planned_networks import cities, planned, told
from kit.processes import GONE_S, LIMIT_S, SCRIPT, Command, descendants, finished, free_ports, started, until

from narrows.protocols.config.deployment import Deployment, StageServer, WorkerProcess, parse
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.ps.command import cli as serve
from narrows.ps.command.planning.probe import command as probe
from narrows.ps.command.stage_servers import watching
from narrows.worker.command import cli as work

FAILS_ONCE = """
import pathlib
if not pathlib.Path("failed").exists():
    pathlib.Path("failed").touch()
    sys.exit(1)
"""
ENOUGH = "if os.path.exists('enough'): break"


def plan(folder: Path, **rows: Any) -> str:
    """The root on host a, and a worker on b."""
    first = free_ports(3)
    document = {
        "version": 1,
        "hosts": {"a": "127.0.0.1", "b": "127.0.0.1", "c": "127.0.0.1"},
        "stages": [{"host": "a", "port": first, "flags": {"sync": "ssp"}}],
        "processes": [{"stage": 0, "replica": 0, "host": "b", "port": first + 2}],
    }
    for row in rows.get("clusters", []) + rows.get("guests", []):
        row["port"] = first + 1
    (folder / "plan.json").write_text(json.dumps(document | rows))
    return str(folder / "plan.json")


CLUSTER: dict[str, Any] = {"host": "a", "flags": {"sync": "ssp"}, "replicas": [0]}


@pytest.mark.parametrize(("rows", "said"), [
    ({"clusters": [CLUSTER], "samples": [5]}, "cluster 0: is member 1 of 1"),
    ({"guests": [{"host": "c"}]}, "guest 0: has shard 1 of the server"),
])  # fmt: skip
def test_hosts_start_their_parts_in_any_order_and_all_end(tmp_path: Path, rows: dict[str, Any], said: str) -> None:
    """Workers first, then who has the server below, then who has it above. A worker that fails is started again."""
    file, script = plan(tmp_path, **rows), tmp_path / "script.py"
    script.write_text(f"import sys\nprint(sys.argv.pop())\n{FAILS_ONCE}\n{SCRIPT % ENOUGH}")
    with ExitStack() as stack:

        def start(command: str, host: str, *more: str) -> Command:
            words = (command, "--plan", file, "--host", host, "--name", "oslo", *more)
            return stack.enter_context(started(*words, cwd=tmp_path))

        worker = start("ps-worker", "b", "--restarts", "1", str(script), "samples={samples}")
        hosts = [row["host"] for row in rows.get("guests", [])] + ["a"]
        servers = [start("ps-serve", host, "--checkpoint-dir", "none") for host in hosts]
        until(lambda: said in servers[0].out or any(s.process.poll() for s in servers), servers[0])
        (tmp_path / "enough").touch()
        for command in (worker, *servers):
            assert command.wait() == 0, command
        assert said in servers[0].out and "run oslo: serves" in servers[-1].out, servers[0]
        assert "started again (1 of 1)" in worker.out + worker.err, worker
        assert f"samples={rows.get('samples', ['{samples}'])[0]}" in worker.out, worker


def stale(file: str) -> str:
    """A copy of the plan, as it was before somebody changed it."""
    old = Path(file).with_name("old.json")
    old.write_text(json.dumps(json.loads(Path(file).read_text()) | {"lease": 77.0}))
    return str(old)


def both(old: str, new: str) -> str:
    here, there = (parse(Path(file).read_text()).digest for file in (old, new))
    return f"plan.json differs from the server's: its digest here is {here:014x}, and there {there:014x}"


@pytest.mark.parametrize("rows", [{"clusters": [CLUSTER | {"host": "c"}]}, {"guests": [{"host": "c"}]}])
def test_a_server_with_another_copy_of_the_plan_is_refused(tmp_path: Path, rows: dict[str, Any]) -> None:
    file = plan(tmp_path, **rows)
    with started("ps-serve", "--plan", file, "--host", "a", "--checkpoint-dir", "none", cwd=tmp_path) as root:
        until(lambda: "stage 0: serves 1 shard" in root.out, root)
        words = ("ps-serve", "--plan", stale(file), "--host", "c", "--checkpoint-dir", "none")
        code, _, said = finished(*words, cwd=tmp_path)
    assert code == 5 and both(stale(file), file) in said


def test_a_worker_with_another_copy_of_the_plan_is_refused_and_one_without_a_plan_joins(tmp_path: Path) -> None:
    file, script = plan(tmp_path), tmp_path / "script.py"
    script.write_text(SCRIPT % "pass")
    with started("ps-serve", "--plan", file, "--host", "a", "--checkpoint-dir", "none", cwd=tmp_path) as root:
        until(lambda: "stage 0: serves 1 shard" in root.out, root)
        code, _, said = finished("ps-worker", "--plan", stale(file), "--host", "b", str(script), "1", cwd=tmp_path)
        assert code == 5 and both(stale(file), file) in said
        there = f"tcp://127.0.0.1:{json.loads(Path(file).read_text())['stages'][0]['port']}"
        assert finished("ps-worker", "--server", there, str(script), "1", cwd=tmp_path)[0] == 0
        assert root.wait() == 0, root


def test_a_signal_ends_all_servers_of_a_host(tmp_path: Path) -> None:
    file = plan(tmp_path, clusters=[CLUSTER])
    with started("ps-serve", "--plan", file, "--host", "a", "--ready-file", "ready", cwd=tmp_path) as server:
        until(lambda: all((tmp_path / f"ready.{name}-0").exists() for name in ("stage", "cluster")), server)
        left = descendants(server.pid)
        server.process.send_signal(signal.SIGTERM)
        assert len(left) >= 4 and server.wait() == 128 + signal.SIGTERM, server
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), f"the end of {left}", GONE_S)


def test_a_planned_run_is_watched_at_its_root_and_its_links_go_back_into_a_network(tmp_path: Path) -> None:
    file, script, page = plan(tmp_path), tmp_path / "script.py", f"127.0.0.1:{free_ports(1)}"
    script.write_text(SCRIPT % ENOUGH)
    looks = (
        "--dashboard",
        page,
        "--metrics",
        page,
        "--record",
        "run.jsonl",
        "--replicas",
        "1",
        "--checkpoint-dir",
        "none",
    )
    with ExitStack() as stack:
        root = stack.enter_context(started("ps-serve", "--plan", file, "--host", "a", *looks, cwd=tmp_path))
        worker = stack.enter_context(started("ps-worker", "--plan", file, "--host", "b", str(script), cwd=tmp_path))
        until(lambda: "no standby yet: start ps-serve --standby" in root.out, root)

        def fed_back() -> bool:
            words = ["--run", page, "--out", str(tmp_path / "network.json"), "--name", "root"]
            try:
                return not CliRunner().invoke(probe, words, standalone_mode=False, catch_exceptions=False).return_value
            except NarrowsError:  # nothing is known yet
                return False

        until(fed_back, worker)
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=LIMIT_S) as answer:
            assert b"narrows_" in answer.read()
        (tmp_path / "enough").touch()
        assert worker.wait() == root.wait() == 0, root
    assert {link["to"] for link in json.loads((tmp_path / "network.json").read_text())["links"]} >= {"root"}
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["event"] == "run"


def stages(count: int) -> Deployment:
    """Stage i is served on host a, then b; each host has both processes of one replica."""
    hosts = {"a": "127.0.0.1", "b": "127.0.0.2"}
    served = [StageServer("ab"[i], 5555) for i in range(count)]
    return Deployment(hosts, served, [WorkerProcess(i, 0, "ab"[i], 6000) for i in range(count)])


def test_who_looks_at_a_run_is_told_where(tmp_path: Path) -> None:
    """A data parallel run at its root's host alone, a pipeline by a record of each stage."""
    given = {"dashboard": "5550", "metrics": "", "record": "run", "replicas": 1}
    assert watching(stages(1), "a", given) == {"stage-0": ["--dashboard", "5550", "--record", "run", "--replicas", "1"]}
    with pytest.raises(UsageError, match="--dashboard: the root's server takes it, which stands on a; give it there"):
        watching(stages(1), "b", given)
    assert watching(stages(2), "b", {"record": "run"}) == {"stage-1": ["--record", "run.stage-1"]}
    for name in ("dashboard", "metrics", "replicas"):
        with pytest.raises(UsageError, match=f"--{name}: each of the 2 stages is a run of its own"):
            watching(stages(2), "a", {"record": "run", name: 1})
    assert watching(stages(1), "b", dict.fromkeys(given, "")) == {}


AGAIN = """
import sys
from narrows.protocols.config.deployment import ServerStart, StageServer
from narrows.ps.command.stage_servers import StageServers
server = ServerStart("cluster 0", StageServer("a", 1), sys.argv[1], [], "", [])
sys.exit(StageServers([server], [["-c", sys.argv[2]]], {}).watch())
"""


@pytest.mark.parametrize(("above", "code"), [("tcp://127.0.0.1:1", 0), ("", 3)])
def test_one_that_does_not_find_the_server_above_is_started_again(tmp_path: Path, above: str, code: int) -> None:
    """It ends with 3 until a file is there, which the first one makes."""
    there = f"pathlib.Path({str(tmp_path / 'there')!r})"
    child = f"import pathlib, sys; found = {there}.exists(); {there}.touch(); sys.exit(0 if found else 3)"
    done = subprocess.run([sys.executable, "-c", AGAIN, above, child], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, done
    assert ("is started again, and waits for the server at tcp://127.0.0.1:1" in done.stdout) == (not code)


SIGNALLED = """
import signal, sys
from narrows.protocols.config.deployment import ServerStart, StageServer
from narrows.ps.command.stage_servers import StageServers
servers = [ServerStart(f"cluster {i}", StageServer("a", 1), "", [], "", []) for i in range(2)]
ends = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(%s)); print(); time.sleep(60)"
servers = StageServers(servers, [["-u", "-c", ends % code] for code in sys.argv[1:]], {})
following, begun = servers.children.next, set()
def next_event(limit_s):
    event = following(limit_s)
    if event and event[1] == "out":
        begun.add(event[0])
        if len(begun) == 2:
            signal.raise_signal(signal.SIGTERM)
    return event
servers.children.next = next_event
sys.exit(servers.watch())
"""


@pytest.mark.parametrize(
    ("codes", "code"), [(("143", "6"), 143), (("6", "6"), 143), (("143", "7"), 7), (("7", "143"), 7)]
)
def test_a_server_that_a_signal_leaves_without_its_parent_has_not_failed(codes: tuple[str, ...], code: int) -> None:
    """One that could not save its model has."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED, *codes], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, done


@pytest.mark.parametrize(("words", "why"), [
    (["--restarts", "1"], "--restarts: a stage is not started again alone"),
    (["--server", "tcp://127.0.0.1:1"], "--server: the plan says which processes this host has"),
])  # fmt: skip
def test_flags_that_a_plan_has_no_use_for_are_refused(tmp_path: Path, words: list[str], why: str) -> None:
    first, flags = free_ports(4), {"sync": "ssp"}
    rows = {
        "stages": [{"host": "a", "port": first + i, "flags": flags} for i in range(2)],
        "processes": [{"stage": i, "replica": 0, "host": "b", "port": first + 2 + i} for i in range(2)],
    }
    (script := tmp_path / "script.py").touch()
    words = ["--plan", plan(tmp_path, **rows), "--host", "b", *words, str(script)]
    with pytest.raises(UsageError, match=why):
        CliRunner().invoke(work.command, words, catch_exceptions=False, standalone_mode=False)


def test_a_host_without_a_server_is_told_what_it_has_instead(tmp_path: Path) -> None:
    words = ["--plan", plan(tmp_path), "--host", "c"]
    with pytest.raises(UsageError, match="no server stands on c; its workers are started with ps-worker --plan"):
        CliRunner().invoke(serve.command, words, catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(("form", "shared"), [("short", True), ("long", False)])
def test_what_ps_plan_prints_runs_as_it_is_printed_with_its_keys(tmp_path: Path, form: str, shared: bool) -> None:
    """Two clusters of two. All hosts have one home, or each has a folder of its own, to which the keys are handed over that the
    output names."""
    place, network = random.SystemRandom().randrange(1 << 14), cities([2, 2], 2, 20)
    address = {name: f"127.{64 + place // 256}.{place % 256}.{i + 1}" for i, name in enumerate(network.hosts)}
    homes = {name: tmp_path if shared else tmp_path / name for name in network.hosts}
    output, document = planned(
        tmp_path, network, "--script", "script.py", "--step", "3", "--commands", form,
        *(word for each in address.items() for word in ("--address", "=".join(each))),
    )  # fmt: skip
    assert len(document["clusters"]) == 2 and len({cluster["host"] for cluster in document["clusters"]}) == 2
    for home in homes.values():
        home.mkdir(exist_ok=True)
        (home / "script.py").write_text(f"import sys\n{SCRIPT % 'if step_count() > 3: break'}")
    blocks = re.findall(r"^on (.+):\n((?:    .+\n)+)", output, re.MULTILINE)
    commands = [(homes[host], shlex.split(line)) for host, lines in blocks for line in lines.splitlines()]
    for home, words in commands:
        if words[1] == "keys":
            code, _, said = finished(*words, cwd=home)
            assert code == 0, said
    for path, source, target in re.findall(r"^    (\S+) from (\S+) to (\S+)$", output, re.MULTILINE):
        if not shared:
            (there := homes[target] / path).parent.mkdir(mode=0o700, exist_ok=True)
            shutil.copy2(homes[source] / path, there)
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                started(words[0], *["--checkpoint-dir", "none"] * (words[0] == "ps-serve"), *words[1:], cwd=home)
            )
            for home, words in commands
            if words[1] != "keys"
        ]
        for command in sorted(running, key=lambda command: command.words[0], reverse=True):  # workers first
            assert command.wait() == 0, "\n".join(map(str, running))


def test_a_plan_of_updates_without_delay_carries_its_flags_and_runs(tmp_path: Path) -> None:
    """The plan of sixteen workers, of whom two run: the root's host and another one."""
    place, network = random.SystemRandom().randrange(1 << 14), cities([1] * 16, 100, 20)
    address = {name: f"127.{64 + place // 256}.{place % 256}.{i + 1}" for i, name in enumerate(network.hosts)}
    output, document = planned(
        tmp_path, network, "--script", "script.py", "--step", "3", "--insecure", "--commands", "long",
        *(word for each in address.items() for word in ("--address", "=".join(each))),
    )  # fmt: skip
    (serves,) = (words for words in told(output) if words[0] == "ps-serve" and "--join" not in words)
    given = dict(pairwise(serves))
    named = {"--sync": "bsp", "--push": "update", "--compress": "int4", "--compress-down": "int4"}
    assert named.items() <= given.items() and "--staleness" not in given
    root = document["stages"][0]["host"]
    names = [root, next(name for name in network.hosts if name != root)]
    document["hosts"], document["guests"] = {name: address[name] for name in names}, []
    document["processes"] = [document["processes"][i] | {"replica": i, "host": name} for i, name in enumerate(names)]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    (tmp_path / "script.py").write_text(f"import sys\n{SCRIPT % 'if step_count() > 3: break'}")
    with ExitStack() as stack:

        def start(command: str, host: str, *more: str) -> Command:
            return stack.enter_context(started(command, "--plan", "plan.json", "--host", host, *more, cwd=tmp_path))

        server = start("ps-serve", root, "--checkpoint-dir", "none", "--record", "run.jsonl")
        workers = [start("ps-worker", name, "script.py") for name in names]
        assert all(command.wait() == 0 for command in (*workers, server)), "\n".join(map(str, (server, *workers)))
    run = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert run["summary"] == "--sync bsp, staleness 0, --compress int4, --compress-down int4"


def test_a_key_that_was_not_handed_over_is_named_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script := tmp_path / "script.py").touch()
    clusters = [{"host": "c", "flags": {"sync": "ssp"}, "replicas": [0]}]
    file = plan(tmp_path, keys="KEYS", hosts={name: f"10.0.0.{i}" for i, name in enumerate("abc")}, clusters=clusters)
    for command, host, missing in ((work.command, "b", "KEYS-c-cluster/b"), (serve.command, "c", "KEYS/c-cluster")):
        words = ["--plan", file, "--host", host, *([str(script)] if host == "b" else [])]
        name = missing.rpartition("/")[2]
        with pytest.raises(UsageError, match=rf"neither {missing}\.key nor {name}\.key is here; .* hand it over"):
            CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)
