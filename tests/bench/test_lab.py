"""The network lab does what it says: its links' delay, rate, loss and queue, the kernel's counts, and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from contenders import wan
from kit.processes import alive, descendants, until
from lab import netns, path_meter
from lab.launch import CommandFailed
from lab.link import Way
from lab.netns import Host, pair, star

needs_lab = pytest.mark.skipif(bool(netns.available()), reason=netns.available() or "available")
HEADERS = 28  # of UDP over IPv4
SILENCE_S = 0.3  # beyond every delay here: after it nothing comes any more
BENCH = Path(netns.__file__).parents[1]
WHERE = ("--bind", "--insecure", "--keys", "--parent", "--parent-key", "--server")


Arrivals = list[tuple[int, float]]  # (number of the packet, seconds since the first was sent), in the order of arrival


def burst(source: Host, sink: Host, count: int, size: int, meanwhile: Callable[[], object] = int) -> Arrivals:
    """Sends `count` packets of `size` bytes of IP at once."""
    with source.socket(socket.SOCK_DGRAM) as sender, sink.socket(socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        receiver.bind((sink.address, 0))
        receiver.settimeout(SILENCE_S)
        begin = time.monotonic()
        for number in range(count):
            sender.sendto(struct.pack("i", number).ljust(size - HEADERS), receiver.getsockname())
        meanwhile()
        arrived: Arrivals = []
        try:
            while True:
                packet = receiver.recv(size)
                arrived.append((struct.unpack_from("i", packet)[0], time.monotonic() - begin))
        except TimeoutError:
            return arrived


def seconds(arrived: Arrivals) -> float:
    """Until the last came."""
    return arrived[-1][1]


@needs_lab
def test_hosts_apart_reach_the_last_one_alone() -> None:
    with netns.apart([Way(100e6, 0.005)] * 2) as lab:
        first, second, hub = lab.hosts
        with hub.socket() as listener, second.socket() as other:
            for each, host in ((listener, hub), (other, second)):
                each.bind((host.address, 4000))
                each.listen()
            with first.socket() as line:
                line.settimeout(10)
                line.connect((hub.address, 4000))
            with first.socket() as line:
                line.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    line.connect((second.address, 4000))


@needs_lab
def test_delay_is_what_was_asked_and_a_change_takes_effect() -> None:
    with pair(Way(100e6, delay_s=0.03), Way(100e6, delay_s=0.01)) as two:
        here, there = two.hosts
        assert 0.040 <= min(path_meter.round_trips(here, there, 40, 5)) < 0.042
        two.links[0].change(delay_s=0.005)
        assert 0.010 <= min(path_meter.round_trips(here, there, 40, 5)) < 0.012


@needs_lab
def test_a_stream_gets_the_rate() -> None:
    with pair(Way(20e6, delay_s=0.005)) as two:
        here, there = two.hosts
        stream = path_meter.stream(here, there, 2.5)
        assert stream.rate == pytest.approx(20e6 * 1448 / 1500, rel=0.1)
        assert stream.payload * 1500 / 1448 == pytest.approx(stream.received, rel=0.02)
        assert stream.received <= stream.sent


@needs_lab
def test_each_way_has_its_own_rate_and_a_change_takes_effect_in_the_midst_of_a_queue() -> None:
    with pair(Way(4e6, queue_bytes=100_000), Way(1e6, queue_bytes=100_000)) as two:
        here, there = two.hosts
        assert seconds(burst(here, there, 50, 1000)) == pytest.approx(0.1, rel=0.1)
        assert seconds(burst(there, here, 50, 1000)) == pytest.approx(0.4, rel=0.1)
        begin = time.monotonic()
        changed = []

        def faster() -> None:
            time.sleep(0.2)  # half of the packets are through
            two.links[0].change(rate=10e6)
            changed.append(time.monotonic() - begin)

        took = seconds(burst(there, here, 50, 1000, faster))
        assert took == pytest.approx(changed[0] + (0.4 - changed[0]) / 10, rel=0.1)


@needs_lab
def test_the_kernel_counts_headers_and_the_link_agrees() -> None:
    with pair(Way(100e6)) as two:
        here, there = two.hosts
        assert here.bytes() == there.bytes() == (0, 0)
        assert len(burst(here, there, 20, 1000)) == 20
        assert here.bytes() == (0, 20_000) and there.bytes() == (20_000, 0)
        assert two.links[0].counts() == ((20, 20_000, 0, 0), (0, 0, 0, 0))


@needs_lab
def test_the_queue_drops_at_its_tail() -> None:
    with pair(Way(1e6, queue_bytes=10_000)) as two:
        here, there = two.hosts
        arrived = [number for number, _ in burst(here, there, 40, 1000)]
        assert arrived[:10] == list(range(10)) and len(arrived) <= 12  # one or two were sent while others came
        assert two.links[0].counts()[0].dropped == 40 - len(arrived)


@needs_lab
def test_loss_takes_its_share_and_the_same_packets_for_a_seed() -> None:
    def lost(seed: int) -> set[int]:
        with pair(Way(100e6, loss=0.05, queue_bytes=1 << 20), seed=seed) as two:
            here, there = two.hosts
            arrived = {number for number, _ in burst(here, there, 1000, 100)}
            assert two.links[0].counts()[0].lost == 1000 - len(arrived)
            return set(range(1000)) - arrived

    first = lost(1)
    assert 25 <= len(first) <= 75  # 3.6 standard deviations
    assert lost(1) == first != lost(2)


@needs_lab
def test_jitter_stays_within_its_bounds_and_keeps_the_order() -> None:
    with pair(Way(100e6, delay_s=0.02, jitter_s=0.01)) as two:
        here, there = two.hosts
        times = path_meter.round_trips(here, there, 30, 5)
        assert 0.02 <= min(times) < 0.035 and max(times) > 0.045
        assert [number for number, _ in burst(here, there, 200, 100)] == list(range(200))


@needs_lab
def test_a_cut_loses_what_is_under_way_and_a_mended_link_is_as_before() -> None:
    with pair(Way(100e6, delay_s=0.05)) as two:
        here, there = two.hosts
        link = two.links[0]
        assert burst(here, there, 5, 1000, link.cut) == []
        assert burst(here, there, 5, 1000) == []
        link.mend()
        assert len(burst(here, there, 5, 1000)) == 5
        assert link.counts()[0] == (5, 5000, 0, 10)


@needs_lab
def test_the_hosts_of_a_star_have_a_link_each() -> None:
    with star([Way(10e6, delay_s=delay) for delay in (0.001, 0.002, 0.01)]) as three:
        first, second, third, switch = three.hosts
        assert 0.022 <= min(path_meter.round_trips(first, third, 5, 5)) < 0.026
        assert second.bytes() == (0, 0) and first.bytes() == third.bytes()[::-1]
        assert sum(switch.bytes()) == 2 * sum(first.bytes())


@needs_lab
def test_commands_run_inside_and_a_link_that_died_is_one_sentence() -> None:
    with pair(Way(10e6)) as two:
        here, there = two.hosts
        assert here.address in here.run(["ip", "address"], 5) and here.address not in there.run(["ip", "address"], 5)
        with pytest.raises(CommandFailed, match="exit code 1"):
            here.run(["false"], 5)
        two.links[0]._process.kill()
        with pytest.raises(CommandFailed, match="a link has ended"):
            two.links[0].counts()


def left(pid: int) -> list[str]:
    return [path.name for path in netns.NETNS.glob(f"narrows-{pid}-*")]


SCRIPT = """
import signal, time
from lab.link import Way
from lab.netns import pair
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with it ignored
with pair(Way(1e6)) as two:
    sleeper = two.hosts[0].popen(["sh", "-c", "sleep 100 & wait"])
    print(two.links[0]._process.pid, sleeper.pid, flush=True)
    time.sleep(100)
"""


@needs_lab
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(ending: signal.Signals) -> None:
    env = os.environ | {"PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        link, sleeper = (int(word) for word in run.stdout.readline().split())
        try:
            pids = [link, sleeper, *until(lambda: descendants(sleeper), "a grandchild", 10)]
            assert all(map(alive, pids)) and len(left(run.pid)) == 2
            run.send_signal(ending)
            run.wait(20)
        finally:
            run.kill()
    if ending == signal.SIGKILL:  # then the next one sees to it
        netns.sweep()
    until(lambda: not any(map(alive, pids)), "its processes to be gone", 10)
    assert left(run.pid) == []


@needs_lab
def test_nothing_is_left_after_an_error() -> None:
    before = left(os.getpid())
    pids = []

    def fail() -> None:
        with pair(Way(1e6)) as two:
            pids.append(two.hosts[1].popen(["sleep", "100"]).pid)
            assert len(left(os.getpid())) == len(before) + 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left(os.getpid()) == before and not alive(pids[0])


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netns.available() == "the network lab needs root"
    done = CliRunner().invoke(netns.main, ["--rate", "1mbit"])
    assert done.exit_code == 1 and done.output == "Error: the network lab needs root\n"


@needs_lab
def test_a_missing_compiler_and_a_missing_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "cc" else name)
    assert netns.available() == "the network lab needs a C compiler named cc"
    monkeypatch.setattr(netns, "TUN", Path("/dev/net/none"))
    assert netns.available() == "the network lab needs /dev/net/none"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "20mbot"], "'20mbot' is not a number with one of bit, kbit, mbit, gbit"),
        (["--jitter", "30ms"], "jitter within the delay"),
        (["--loss", "101%"], "a loss from 0 to 1"),
        (["--rate", "100gbit"], "up to 1e+10 bit/s"),
    ],
)
def test_what_no_link_can_be_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(netns.main, words)
    assert done.exit_code == 2 and said in done.output


def flags(words: list[str]) -> dict[str, str]:
    """Names and values, without what says where, and for whom: addresses and keys."""
    told = dict(pairwise([*words, ""]))
    return {name: value for name, value in told.items() if name[:1] == "-" and name not in WHERE}


def test_the_recipe_that_is_measured_is_readmes() -> None:
    """bench/contenders/wan.py runs the three commands for two cities with other addresses, and nothing else."""
    row = next(row for row in wan.ROWS if "README" in row.name)
    text = (BENCH.parent / "README.md").read_text("utf-8")
    recipe = [line for line in text.splitlines() if re.fullmatch(r"    ps-.*# in (one|each) city", line)]
    root, cluster, worker = (flags(shlex.split(line, comments=True)[1:]) for line in recipe)
    assert root == flags(["--workers", "2", *row.above])
    assert cluster == flags(list(row.below)) and worker == {"-n": str(row.each)}
