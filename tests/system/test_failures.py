"""Faults of processes: signals, sudden deaths, a server that goes and comes back, strangers at its port."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from kit.one_port import DIRECTLY, dialled
from kit.processes import (
    GONE_S,
    ROOT,
    SCRIPT,
    Command,
    Server,
    Worker,
    alive,
    descendants,
    finished,
    free_ports,
    serving,
    small_model,
    started,
    trained_alone,
    until,
)
from kit.scripts import distance, flat
from safetensors.torch import load_file

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.addresses import shard_name
from narrows.protocols.errors import ServerLostError
from narrows.protocols.runtime.network.socks_dialler import SocksDialler
from narrows.protocols.wire import HEADER_BYTES_MAX, decode, encode
from narrows.ps.checkpoints.checkpoint_files import clocks

# Signals and deaths of ps-worker.


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Trains for ever, beside a process of its own; says so once."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "if step_count() == 3: subprocess.Popen(['sleep', '600']); print('trains', flush=True)")
    return path


PAUSE_S = 4.0


@pytest.mark.parametrize("flags", ["--sync bsp --push update --shards 2", "--sync gossip"])
def test_everything_may_be_suspended_for_longer_than_any_limit(flags: str, tmp_path: Path) -> None:
    """A laptop's lid, a paused machine: nobody has heard anybody, and nobody is lost."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "time.sleep(0.02)")
    with (
        serving(*flags.split(), "--workers", "2", "--lease", "1") as server,
        started(
            "ps-worker", "--server", server.address, "-n", "2", "--server-timeout", "2", str(path), "150"
        ) as command,
    ):
        until(lambda: re.search(r"clock [1-9]", command.err) or command.process.poll() is not None, command)
        pids = [*descendants(command.pid), command.pid, *descendants(server.command.pid), server.command.pid]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert command.wait() == 0, f"{command} {server.command}"
        assert server.command.wait() == 0, server.command
        assert "expired" not in server.command.out, server.command


def alone(command: Command, number: int) -> None:
    os.kill(command.pid, number)


def group(command: Command, number: int) -> None:
    os.killpg(command.pid, number)


@pytest.mark.parametrize(("whom", "number", "code", "said"), [
    (group, signal.SIGINT, 130, "0 of 1 workers done"),
    (alone, signal.SIGTERM, 143, "0 of 1 workers done"),
    (alone, signal.SIGKILL, -signal.SIGKILL, ""),
])  # fmt: skip
def test_nothing_is_left_of_a_ps_worker_that_is_ended(
    whom: object, number: int, code: int, said: str, script: Path
) -> None:
    with started("ps-worker", str(script)) as command:
        until(lambda: command.out == "trains\n" or command.process.poll() is not None, command)
        pids = descendants(command.pid)
        assert len(pids) >= 6, "a server, its shard, a worker, what that started, and who forked them"
        assert callable(whom)
        whom(command, number)
        assert command.wait(GONE_S) == code, command
        until(lambda: not any(map(alive, pids)), "all processes to be gone", GONE_S)
        assert said in command.err and "Traceback" not in command.err


STOPPED = """
import subprocess, sys
from narrows.protocols.errors import ServerLostError
from narrows.worker import session
session._launcher_fd = int(sys.argv[1])
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
sys.stdin.read(1)
session._end(ServerLostError("the server was stopped at clock 3"))
"""


@pytest.mark.parametrize("dies_s", [0.0, 0.2])
def test_a_worker_whose_server_was_stopped_waits_for_a_ps_worker_that_dies(dies_s: float) -> None:
    """When a ps-worker is killed, its server may stop the worker before the worker's pipe ends."""
    ours, theirs = os.pipe()
    words, pipe = [sys.executable, "-c", STOPPED, str(ours)], subprocess.PIPE
    with subprocess.Popen(words, pass_fds=[ours], start_new_session=True, stdin=pipe, stdout=pipe, text=True) as worker:
        os.close(ours)
        assert worker.stdout is not None and worker.stdin is not None
        child = int(worker.stdout.readline())
        worker.stdin.close()
        time.sleep(dies_s)
        os.close(theirs)
        assert worker.wait(GONE_S) == -signal.SIGKILL
    until(lambda: not alive(child), "what the script has started to be gone", GONE_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("name", ["ps-worker", "ps-serve"])
def test_nothing_is_left_of_a_command_that_is_ended_while_it_starts(
    name: str, number: int, code: int, script: Path
) -> None:
    words = [str(script)] if name == "ps-worker" else ["--checkpoint-dir", "none", "--bind", "tcp://127.0.0.1:0"]
    # In an interpreter of its own: one that is forked has its kernels, and may serve before this looks.
    with started(name, *words, env={"PYTHONNOUSERSITE": "1"}) as command:
        until(lambda: "loading kernels ..." in command.err + command.out, command)
        pids = descendants(command.pid)
        assert pids and not command.out.count("\n") > 1
        os.kill(command.pid, number)
        assert command.wait(GONE_S) == code, command
        until(lambda: not any(map(alive, pids)), "all processes to be gone", GONE_S)
        assert "Traceback" not in command.err


def test_a_worker_in_its_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    """It has no session yet."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('imports', flush=True)\nfor _ in range(6000): time.sleep(0.1)\n"
    )
    (tmp_path / "script.py").write_text("import slow\n")
    with started("ps-worker", "-n", "2", str(tmp_path / "script.py")) as command:
        until(lambda: command.out == "imports\nimports\n" or command.process.poll() is not None, command)
        os.kill(command.pid, signal.SIGINT)
        assert command.wait(GONE_S) == 130, command
        assert "0 of 2 workers done" in command.err
        assert "Traceback" not in command.err and "KeyboardInterrupt" not in command.err, command


# A server that goes.


def test_a_server_that_is_silent_is_named_and_so_is_its_return(script: Path) -> None:
    with (
        serving() as server,
        started("ps-worker", "--server", server.address, str(script)) as own,
    ):
        until(lambda: own.out == "trains\n" or own.process.poll() is not None, own)
        pids = [server.command.pid, *descendants(server.command.pid)]
        silent = f"ps-worker: the server at {server.address} has not answered for 3 s; waiting up to 30 s\n"
        back = f"ps-worker: the server at {server.address} answers again\n"
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            until(lambda: silent in own.err, own)
            assert back not in own.err
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        until(lambda: back in own.err, own)
        assert (own.err.count(silent), own.err.count(back)) == (1, 1), own


def test_a_server_that_is_killed_is_lost(script: Path) -> None:
    with (
        serving() as server,
        started("ps-worker", "--server", server.address, "--server-timeout", "2", str(script)) as own,
    ):
        until(lambda: own.out == "trains\n" or own.process.poll() is not None, own)
        server.kill()
        assert own.wait() == 6, own
        assert f"ps-worker: {server.address}: the server has not answered for 2 s\n" in own.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_server_that_is_ended_says_so_and_leaves_a_checkpoint(number: int, code: int, tmp_path: Path) -> None:
    """The shards outlive a ps-serve that was killed by just as long as a checkpoint takes."""
    with serving("--shards", "2", "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address)
        worker.train(5)
        os.kill(server.pids[0], number)
        with pytest.raises(ServerLostError, match="the server was stopped at clock "):
            worker.train(100_000)
        worker.session.link.close()
        assert server.command.wait(GONE_S) == code
        until(lambda: not any(map(alive, server.pids)), "all processes to be gone", GONE_S)
    names = {path.name for path in tmp_path.iterdir()}
    first, second = (clocks(tmp_path, shard) for shard in range(2))
    assert first == second and worker.clock - 2 <= first[-1] <= worker.clock
    assert ("model.safetensors" in names) == (code > 0)


def test_a_server_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    port = free_ports(2)
    flags = f"--sync bsp --shards 2 --checkpoint-every 0.1 --checkpoint-dir {tmp_path} --resume".split()

    def written() -> set[int]:
        return set(clocks(tmp_path, 0)) & set(clocks(tmp_path, 1))

    def stepped() -> set[int]:
        worker.step()
        return written()

    anew = "so the run begins anew"
    with serving(*flags, port=port) as server:
        assert f"--resume: {tmp_path} has no checkpoint, {anew}" in server.command.out
        worker = Worker(server.address)
        until(stepped, "a checkpoint")
        server.kill()
        reached = worker.clock
    with serving(*flags, port=port) as server:
        joined = until(lambda: re.search(r"joined at clock (\d+)", server.command.out), server.command)
        assert anew not in server.command.out
        again = int(joined[1])
        assert 0 < again <= reached
        worker.step()  # of a clock that is lost: it is not pushed
        worker.train(5)
        assert again < worker.clock <= again + 6
        worker.close()
        assert server.command.wait() == 0, server.command
    assert (tmp_path / "model.safetensors").exists(), server.command
    model = small_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert distance(flat(model), trained_alone(worker.clock)) < 1e-5


# One of four workers dies.

DIGITS = f"""
import os, sys, time, torch
sys.path.insert(0, {str(ROOT / "bench" / "tasks")!r})
import numpy as np
from narrows.worker import DistributedOptimizer, clock, rank, record, step_count, world_size

stop, data = sys.argv[1:]
train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in np.load(data).values())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)

def evaluate():
    with optimizer.shared(), torch.no_grad():
        return (model(test_x).argmax(1) == test_y).float().mean().item()

print("begins at", clock(), evaluate(), flush=True)
while not os.path.exists(stop):
    if step_count() > 500:
        time.sleep(0.05)  # trained well: the joiner is to have a core for its imports
    rows = np.random.default_rng((rank(), step_count())).integers(len(train_x), size=32)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
    optimizer.step()
    record(pid=os.getpid())
optimizer.finish()
print("ends at", clock(), evaluate(), flush=True)
"""


RECORDED_LATE = 5  # steps: one is told with the next, and is then on its way to the file


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data as arrays: a worker that need not import scikit-learn begins a second earlier."""
    from kit.tasks import load

    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, *(part.numpy() for part in load("digits").digits()))
    return path


def clocks_and_accuracies(command: Command, word: str) -> list[tuple[int, float]]:
    return [(int(at), float(value)) for at, value in re.findall(rf"{word} at (\d+) (\S+)\n", command.out)]


def test_one_of_four_dies_and_another_joins(digits: Path, tmp_path: Path) -> None:
    """Under a bound; tests/simulation has the other modes."""
    flags, bound = "--sync ssp --staleness 2 --compress topk:0.1+int8", 2
    path, record, stop = (tmp_path / name for name in ("script.py", "run.jsonl", "stop"))
    path.write_text(DIGITS)
    rest = (str(path), str(stop), str(digits))

    def steps(worker: int) -> list[dict[str, float]]:
        lines = record.read_text().splitlines() if record.exists() else []
        events = [json.loads(line) for line in lines[:-1]]
        return [
            event for event in events if event["event"] == "step" and event["local_rank"] == worker and "pid" in event
        ]

    with (
        serving(*flags.split(), "--workers", "4", "--lease", "30") as server,
        started("ps-worker", "--server", server.address, "-n", "4", "--record", str(record), *rest) as four,
    ):
        until(lambda: all(len(steps(worker)) >= 100 for worker in range(4)) or four.process.poll(), four)
        os.kill(int(steps(2)[-1]["pid"]), signal.SIGKILL)
        until(lambda: "local rank 2 was ended" in four.err, "ps-worker to name the worker", GONE_S)
        before = min(steps(worker)[-1]["clock"] for worker in (0, 1, 3))
        with started("ps-worker", "--server", server.address, "--record", str(tmp_path / "own.jsonl"), *rest) as joiner:
            until(lambda: clocks_and_accuracies(joiner, "begins") or joiner.process.poll(), joiner)
            now = [steps(worker)[-1]["clock"] for worker in (0, 1, 3)]
            ((clock, first),) = clocks_and_accuracies(joiner, "begins")
            stop.touch()
            assert four.wait() == 1 and joiner.wait() == 0, f"{four}\n{joiner}"
            assert server.command.wait() == 0, server.command
            ends = [*clocks_and_accuracies(four, "ends"), *clocks_and_accuracies(joiner, "ends")]
            joined = re.findall(r"joined at clock (\d+)", server.command.out)
            assert max(before + 1, int(joined[-1])) <= clock <= min(now) + bound + RECORDED_LATE
        assert "ps-worker: local rank 2 was ended by signal 9 (SIGKILL); the others go on\n" in four.err
        assert "\n3 of 4 workers done in " in four.err
        assert re.search(r"worker \d+ \(rank \d, .*\) stopped at clock \d+; 3 live", server.command.out)
        assert len(ends) == 4 and all(abs(first - last) <= 0.02 for _, last in ends), (first, ends)


# Strangers at the port.


Attacked = tuple[Server, Worker, int]  # the shard that strangers name to the one port


@pytest.fixture(scope="module", params=["own port", "one port", "CONNECT"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    way = () if request.param == "own port" else ("--one-port",)
    with serving("--sync", "bsp", *way) as server, Worker(server.address) as worker:
        yield server, worker, 0 if request.param == "CONNECT" else DIRECTLY


def raw(server: Server, data: bytes, shard: int) -> None:
    with dialled(server.port, shard) as stranger:
        stranger.sendall(data)
        stranger.settimeout(0.1)
        try:
            stranger.recv(64)
        except OSError:
            return


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)  # of ZMTP 3.0


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: narrows\r\n\r\n",
    bytes(range(256)) * 256,
    GREETING[:20],
    GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + bytes(1000),
    GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + b"\xff" * 8,  # a frame of 2^64 - 1 bytes
], ids=["http", "noise", "half a greeting", "zeros", "endless frame"])  # fmt: skip
def test_bytes_that_are_no_zeromq(data: bytes, attacked: Attacked) -> None:
    server, worker, shard = attacked
    raw(server, data, shard)
    undisturbed(worker)


def test_connections_that_never_speak_take_no_place(tmp_path: Path) -> None:
    """More than the usual 1,024 descriptors of a process: others still join, and checkpoints are written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this system lets no process open so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        flags = ("--sync", "async", "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "0.5")
        with serving(*flags) as server, ExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
            for _ in range(1200):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            before = time.monotonic()
            worker = Worker(server.address)
            assert time.monotonic() - before < 20, "ZeroMQ hangs up on the silent after 30 s"
            worker.train(3)
            for _ in range(10_000):
                worker.step()
                if clocks(tmp_path, 0):
                    break
            assert clocks(tmp_path, 0)
            worker.engine.finish()
            assert server.command.wait() == 0, server.command
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def forged(worker: Worker) -> dict[str, list[bytes]]:
    """Messages that are none, by what is wrong with them."""
    member = worker.session.link.member
    size = worker.engine.flat.size
    payload = np.full(size, 1e9, np.float32).tobytes()
    push = m.Push(member.worker, member.epoch, worker.clock, 0, 1, 0, size, 1, b"", RAW, payload)
    header, body = (bytes(frame) for frame in encode(push))
    return {
        "junk": [b"junk"],
        "empty": [b""],
        "three frames": [header, body, b""],
        "truncated header": [header[:-3], body],
        "no payload": [header],
        "unknown kind": [header[:5] + msgpack.packb([99])],
        "oversized header": [bytes(HEADER_BYTES_MAX + 1)],
        "deep msgpack": [header[:5] + b"\x91" * 100_000],
        "long payload": [bytes(frame) for frame in encode(replace(push, payload=payload + bytes(4)))],
        "short payload": [bytes(frame) for frame in encode(replace(push, payload=payload[:-1]))],
        "foreign keys": [bytes(frame) for frame in encode(replace(push, begin=1, end=size + 1))],
        "later clock": [bytes(frame) for frame in encode(replace(push, clock=worker.clock + 7))],
        "earlier clock": [bytes(frame) for frame in encode(replace(push, clock=worker.clock - 1))],
        "later epoch": [bytes(frame) for frame in encode(replace(push, epoch=member.epoch + 1))],
        "earlier epoch": [bytes(frame) for frame in encode(replace(push, epoch=member.epoch - 1))],
        "another worker": [bytes(frame) for frame in encode(replace(push, worker=member.worker + 1))],
        "no hyper-parameters": [header, body],
        "a server's message": [bytes(frame) for frame in encode(m.LeaveAck("x"))],
        "a ledger": [bytes(frame) for frame in encode(
            m.Ledger(1 << 60, member.epoch, -1, 1, True, 0, (), 1 << 40, (), (), (), -1, True, 0, b"")
        )],
        "a report": [bytes(frame) for frame in encode(
            m.Report(0, 1, 1 << 60, 1, 0, 0, 0, True, 0, 1 << 40, ((member.worker, 1 << 40),), (), ())
        )],
        "a report of trouble": [bytes(frame) for frame in encode(
            m.Report(1, 1, 1 << 60, 1, 0, 0, 0, True, 0, 1 << 40, (), (), (), trouble="all is lost")
        )],
        "an escape sequence": [bytes(encode(m.Hello("t", "here"))[0]).replace(b"here", b"\x1b[2J")],
    }  # fmt: skip


# Who forges the epoch and the id of a member is refused, if it is answered at all, and changes nothing.
NAMES = (
    *("junk", "empty", "three frames", "truncated header", "no payload", "unknown kind", "oversized header"),
    *("deep msgpack", "long payload", "short payload", "foreign keys", "later clock", "earlier clock", "later epoch"),
    *("earlier epoch", "another worker", "no hyper-parameters", "a server's message", "a ledger", "a report"),
    *("a report of trouble", "an escape sequence"),
)
SILENT = ("later epoch",)  # of a member that this shard may yet hear of
LONG = ("oversized header",)  # answered, or hung up on: of a stranger more bytes than STRANGER_BYTES_MAX


@pytest.mark.parametrize("name", NAMES)
def test_messages_that_are_none(name: str, attacked: Attacked) -> None:
    server, worker, shard = attacked
    with ExitStack() as stack, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        if shard == DIRECTLY:
            stranger.connect(f"tcp://127.0.0.1:{server.port}")
        else:
            by = stack.enter_context(closing(SocksDialler(f"127.0.0.1:{server.port}", shard_name(shard))))
            stranger.connect(by.endpoint)
        stranger.send_multipart(forged(worker)[name])
        answered = stranger.poll(100 if name in SILENT else 1000 if name in LONG else 5000)
        assert name in LONG or bool(answered) == (name not in SILENT)
        if answered:
            answer = decode(stranger.recv_multipart())
            assert isinstance(answer, m.Refuse) and answer.text and "\n" not in answer.text
    undisturbed(worker)


def undisturbed(worker: Worker) -> None:
    """A step on, the run is where the same steps in one process are."""
    worker.step()
    assert distance(flat(worker.model), trained_alone(worker.clock)) < 1e-5


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    """A script that will not end is ended."""
    path = tmp_path / "script.py"
    path.write_text(
        "import signal, threading\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "threading.Event().wait()\n"
    )
    with started("ps-worker", "--server", "tcp://127.0.0.1:1", str(path)) as command:
        until(lambda: command.out, command)
        os.kill(command.pid, signal.SIGINT)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(GONE_S) in (130, 143)


def test_a_script_that_never_joins_ends_its_embedded_server(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("print('no training here')\n")
    code, out, err = finished("ps-worker", "--fresh", "--push", "update", str(path))  # neither side imports torch
    assert code == 0 and out == "no training here\n" and "1 of 1 workers done" in err


# A cluster, and the server above it.


def says(server: Server, times: int) -> bool:
    return server.command.out.count("the run:\n--sync bsp") >= times


def test_a_cluster_that_dies_is_left_out_and_a_server_above_that_dies_ends_its_clusters() -> None:
    above = ("--workers", "2", "--sync", "bsp", "--push", "update", "--lease", "2", "--shards", "2")
    with serving(*above) as root:
        below = (
            "--parent",
            root.address,
            "--parent-timeout",
            "3",
            "--shards",
            "2",
            "--sync",
            "bsp",
            "--push",
            "update",
        )
        with serving(*below) as one, serving(*below) as two:
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(Worker, (one.address, two.address))
                list(pool.map(lambda worker: worker.train(5), (first, second)))
            for shows in (root, two):  # the whole tree, at the start and on request
                for times in (1, 2):
                    until(partial(says, shows, times), shows.command)
                    os.kill(shows.command.pid, signal.SIGUSR1)
            two.kill()
            first.train(20)  # the next barrier above waits for a lease, and no longer
            assert re.search(r"worker 1 \(rank 1, .*\) expired at clock \d+; 1 live", root.command.out), root.command
            root.kill()
            with pytest.raises(ServerLostError, match=r"the parent, tcp:.*: the server has not answered for 3 s"):
                first.train(1000)
            assert one.command.wait() == 6, one.command
            assert "the server has not answered for 3 s" in one.command.err and "Traceback" not in one.command.err
