"""ps-probe as a user runs it: with keys, with ports that nobody reaches, and over a link of the lab by a made-up ssh."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.processes import BIN, SCRIPT, finished, sentences, started, until
from lab import launch, netns
from lab.link import MTU, Way
from lab.netns import pair

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.network.hosts import own_host
from narrows.ps.command.planning.probe_runner import by_ssh, words_there
from narrows.ps.command.planning.step_time import STEPS, of_record, step_seconds
from narrows.ps.planner.network import Network
from narrows.ps.probe import flows, pairwise
from narrows.ps.probe.messages import ProbeDial

MB = 10**6
LOOPBACK = "tcp://127.0.0.1:0"


def address(said: str) -> str:
    """That of a director which waits."""
    found = re.search(r"on (tcp://\S+),", said)
    return found[1] if found else ""


def test_machines_with_keys_measure_one_another_within_their_bytes(tmp_path: Path) -> None:
    keys, out = tmp_path / "keys", tmp_path / "network.json"
    assert finished("ps-serve", "keys", "init", str(keys))[0] == 0
    assert finished("ps-serve", "keys", "add", "b", "--keys", str(keys))[0] == 0
    flags = [
        "--bind",
        LOOPBACK,
        "--machines",
        "2",
        "--keys",
        str(keys),
        "--name",
        "a",
        "--bytes",
        "2e7",
        "--out",
        str(out),
    ]
    with started("ps-probe", *flags) as director:
        there = until(lambda: address(director.err), "the director to listen")
        code, _, said = finished("ps-probe", "--join", there, "--name", "stranger", "--wait", "20")
        assert code == 4 and "--key" in said
        assert finished("ps-probe", "--join", there, "--name", "b", "--key", str(keys / "b.key"))[0] == 0
        assert director.wait() == 0, director
        assert "1 pairs in 1 rounds, for round trips and first readings: at most 8 s and 2 MB" in director.err
        assert "streams of 1 pairs in 1 rounds: at most 20 s and 20 MB in all" in director.err
        cost = re.search(r"1 of 1 pairs were measured in [\d.]+ s, with ([\d.]+) MB", director.err)
        assert cost and 1 < float(cost[1]) <= 20.5  # a buffer may be on its way when the limit is met
    document = json.loads(out.read_text())
    network = Network.parse(document)
    assert network.hosts == ("a", "b") and 0 < network.delay_s[0, 1] < 0.05 and (network.memory_bytes > 0).all()
    sent = sum(flow["sent_bytes"] for link in document["links"] for flow in link["flows"])
    assert 1 * MB < sent <= 20.5 * MB  # as above; what a busy machine sends twice counts too
    assert all(0 < flow["bytes"] <= flow["sent_bytes"] for link in document["links"] for flow in link["flows"])

    old = document | {"hosts": ["b", "c"], "links": [link | {"from": "b", "to": "c"} for link in document["links"][:1]]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    code, said, _ = finished("ps-probe", "--merge", str(out), str(tmp_path / "old.json"), "--out", str(out))
    assert code == 0 and json.loads(out.read_text())["hosts"] == ["a", "b", "c"]
    assert said.splitlines()[2].split() == ["a", "b", "c"]


def test_a_port_that_nobody_reaches_is_named_and_the_other_pairs_are_measured(tmp_path: Path) -> None:
    """The name that two of the machines say is theirs leads nowhere."""
    out = tmp_path / "network.json"
    flags = ["--bind", LOOPBACK, "--machines", "3", "--only-others", "--bytes", "1e7", "--out", str(out)]
    with ExitStack() as stack:
        director = stack.enter_context(started("ps-probe", *flags))
        there = until(lambda: address(director.err), "the director to listen")
        for name, host in (("a", "nowhere.invalid"), ("b", "nowhere.invalid"), ("c", "127.0.0.1")):
            stack.enter_context(started("ps-probe", "--join", there, "--name", name, "--host", host))
        assert director.wait() == 1
        (failed,) = (line for line in director.err.splitlines() if line.startswith("ps-probe: not measured"))
    assert re.search(r"(a - b|b - a): port \d+ of nowhere.invalid cannot be dialled", failed)
    links = {(link["from"], link["to"]) for link in json.loads(out.read_text())["links"]}
    assert links == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}


def test_a_pair_is_visited_twice_and_streams_in_doubt_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream is in doubt here, whatever a busy machine lets it have."""
    monkeypatch.setattr(flows, "doubtful", lambda rows: [*flows.AGAIN])
    token, most, stop = "ab" * 16, 1 << 18, threading.Event()
    for first, phases in ((True, {flows.PINGED, *flows.FIRST}), (False, set(flows.VISITS[False]))):
        listener = pairwise.open_port("127.0.0.1", 0)
        asked = ProbeDial(token, "", listener.getsockname()[1], 8.0, first, most, most, 1e-4)
        with ThreadPoolExecutor(1) as pool:
            listens = pool.submit(pairwise.listen, listener, token, 8.0, first, stop)
            found = [*pairwise.dial("127.0.0.1", asked, stop), *listens.result()]
        assert {flow.phase for flow in found} == phases
        assert flows.begun(merged(found)) if first else flows.whole(merged(found))


def merged(found: list[flows.Flow]) -> list[flows.Flow]:
    """Both ends' rows as one."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for flow in found:
        rows.setdefault((flow.phase, flow.way), {}).update(flow.figures)
    return [flows.Flow(*key, figures) for key, figures in rows.items()]


@pytest.mark.skipif(bool(netns.available()), reason=netns.available() or "available")
def test_hosts_are_started_by_ssh_and_an_asymmetric_link_has_two_rates(tmp_path: Path) -> None:
    """In place of ssh a script runs what it is given on the other host of the lab. Keys travel by its stdin."""
    with pair(Way(20e6, delay_s=0.01), Way(5e6, delay_s=0.01)) as two:
        here, there = two.hosts
        ssh = tmp_path / "ssh"
        ssh.write_text(f'#!/bin/sh\nexport PATH={BIN}:$PATH\nexec ip netns exec {there.netns} sh -c "$2"\n')
        ssh.chmod(0o755)
        out = tmp_path / "network.json"
        flags = ["--seconds", "8", "--name", "here", "--out", str(out), "--ssh", f"{ssh} {{host}} {{command}}"]
        said = here.run([str(BIN / "ps-probe"), there.address, *flags], 60, launch.environment())
    assert "Mbit/s, row sends" in said
    network = Network.parse(json.loads(out.read_text()))
    assert set(network.hosts) == {"here", there.address}
    i, j = network.hosts.index("here"), network.hosts.index(there.address)
    payload = (MTU - 52) / MTU / 8
    # Other tests take the processor meanwhile; bench/planning/probe_accuracy.py holds it to 10 % on an idle machine.
    assert network.rates[-1][i, j] == pytest.approx(20e6 * payload, rel=0.2)
    assert network.rates[-1][j, i] == pytest.approx(5e6 * payload, rel=0.2)
    assert network.delay_s[i, j] == pytest.approx(0.01, abs=0.002)
    assert network.rates[0][i, j] < network.rates[-1][i, j]  # a small message is not over its slow start


def test_a_script_makes_some_steps_and_their_seconds_are_in_the_file(tmp_path: Path) -> None:
    """20 steps of a script that would never end."""
    (tmp_path / "train.py").write_text(SCRIPT % "time.sleep(0.02)")
    probe = f"""
import threading
from narrows.ps.command.planning.step_time import of_script
print(of_script({str(tmp_path / "train.py")!r}, threading.Event()))
"""
    said = launch.run([sys.executable, "-c", probe], 100)[0]
    seconds = json.loads(said)
    assert len(seconds) == STEPS and all(0.02 <= each < 5 for each in seconds[1:])


def stand_in(folder: Path, of_host: str = "") -> dict[str, str]:
    """Variables with which `ssh` runs what it is given on this machine, and writes it down. `of_host`: shell, run before."""
    ssh = folder / "ssh"
    ssh.write_text(f"""#!/bin/sh
printf '%s\\n' "$*" >> {folder}/asked
export PATH={BIN}:$PATH SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
{of_host}
exec sh -c "$4"
""")
    ssh.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("access", ["", "--insecure"])
def test_a_host_that_ssh_alone_knows_measures_its_links_and_its_steps(tmp_path: Path, access: str) -> None:
    """The name of ssh's config leads nowhere else. Its record is another one than ours."""
    for name, seconds in (("here", 0.5), ("there", 0.25)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.jsonl").write_text(json.dumps({"event": "step", "step_seconds": seconds}) + "\n")
    env = stand_in(tmp_path, f"cd {tmp_path}/there")
    flags = ["--bind", LOOPBACK, "--record", "run.jsonl", "--bytes", "1e7", "--name", "here", *access.split()]
    code, _, said = finished("ps-probe", "u@alias.of.ssh", *flags, env=env, cwd=tmp_path / "here")
    assert code == 0, said
    document = json.loads((tmp_path / "here" / "network.json").read_text())
    assert sorted(zip(document["hosts"], document["step_seconds"], document["compute"], strict=True)) == [
        ("alias.of.ssh", 0.25, 1.0), ("here", 0.5, 0.5),
    ]  # fmt: skip
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-o BatchMode=yes u@alias.of.ssh ps-probe --join tcp://127.0.0.1:")
    assert ("--insecure" in asked, "--key -" in asked) == ((True, False) if access else (False, True))


def test_a_host_that_nothing_reaches_is_one_sentence(tmp_path: Path) -> None:
    env = stand_in(tmp_path, "echo cannot resolve it >&2; exit 255")
    code, _, said = finished("ps-probe", "no.such.host", "--bind", LOOPBACK, env=env, cwd=tmp_path)
    assert code == 3 and "no.such.host: ps-probe did not start there, or has ended with code 255" in said
    assert "Traceback" not in said and "cannot resolve it" in said


def test_who_has_no_address_here_finds_the_director_by_its_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, none = own_host("127.0.0.1", 22), "alias.of.ssh"
    begin = ["ps-probe", "--join"]
    assert words_there("127.0.0.1", "0.0.0.0", 7, ["-x"]) == [
        *begin, f"tcp://{own}:7", "--name", "127.0.0.1", "--host", "127.0.0.1", "-x",
    ]  # fmt: skip
    assert words_there(none, "0.0.0.0", 7, []) == [*begin, "ssh:7", "--name", none]
    assert words_there(none, "10.0.0.1", 7, []) == [*begin, "tcp://10.0.0.1:7", "--name", none]
    monkeypatch.setenv("SSH_CONNECTION", "fe80::1%eth0 40000 10.0.0.2 22")
    assert by_ssh("ssh:7") == "tcp://[fe80::1%eth0]:7" and by_ssh("tcp://a:1") == "tcp://a:1"
    monkeypatch.delenv("SSH_CONNECTION")
    with pytest.raises(UsageError, match="SSH_CONNECTION is not set; give tcp://HOST:PORT"):
        by_ssh("ssh:7")


def test_a_director_listens_while_it_times_its_steps_and_ends_its_script_with_itself(tmp_path: Path) -> None:
    """Its script makes no step before Ctrl-C, and the other machine has come."""
    train, pid = tmp_path / "train.py", tmp_path / "pid"
    train.write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\nwhile True: time.sleep(0.02)"
    )
    flags = ["--bind", LOOPBACK, "--machines", "2", "--name", "a", "--script", str(train)]
    with ExitStack() as stack:
        director = stack.enter_context(started("ps-probe", *flags, cwd=tmp_path))
        there = until(lambda: address(director.err), "the director to listen")
        stack.enter_context(started("ps-probe", "--join", there, "--name", "b"))
        until(lambda: "b has come" in director.err and "a has come" in director.err, director)
        until(lambda: pid.exists() and pid.read_text(), "the script to run")
        director.process.send_signal(signal.SIGINT)
        assert director.wait() == 130, director
        until(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the end of the script")


def test_a_director_ends_where_its_own_steps_cannot_be_known(tmp_path: Path) -> None:
    code, _, said = finished("ps-probe", "--bind", LOOPBACK, "--machines", "2", "--record", "none.jsonl", cwd=tmp_path)
    assert code == 2 and "ps-probe: --record none.jsonl: No such file" in said


def test_a_record_has_the_seconds_of_a_step_without_waiting(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    rows = [
        {"event": "start"},
        *({"event": "step", "step_seconds": 0.5, "wait_seconds": 0.2, "encode_seconds": 0.1},) * 30,
    ]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st')
    assert of_record(str(record)) == pytest.approx([0.2] * STEPS)
    record.write_text("{}\n")
    code, _, said = finished("ps-probe", "--join", "tcp://127.0.0.1:1", "--record", str(record))
    assert code == 2 and sentences(said) == [f"ps-probe: --record {record}: it has no step of a worker yet"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("", "give HOST..., --bind with --machines"),
        ("--bind tcp://0.0.0.0:0 --machines 2", "anyone who reaches it could take part"),
        ("--join tcp://10.0.0.1:5600", "give --key FILE"),
        ("--join tcp://127.0.0.1:1 --merge", "give one of"),
        ("--merge", "name the files"),
        ("--merge /none.json", "/none.json"),
        ("--bind tcp://127.0.0.1:0 --machines 3 --bytes 1000", "3 pairs need"),
        ("a b --machines 2", "--machines 2"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: str, why: str) -> None:
    from click.testing import CliRunner

    from narrows.ps.command.planning.probe import command

    result = CliRunner().invoke(command, shlex.split(flags), standalone_mode=False)
    assert why in str(result.exception)


def test_a_script_with_an_open_quote_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--script train\.py 'x: close each quote"):
        step_seconds("", "train.py 'x", threading.Event())
