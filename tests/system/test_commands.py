"""ps-serve and ps-worker as a user meets them: what can be said wrong, exit codes, one sentence each, the record."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pty
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import zmq
from kit.processes import LIMIT_S, ROOT, SCRIPT, Worker, environment, finished, sentences, serving, started, until
from kit.trace_format import checked as checked_trace
from kit.trace_format import flows
from safetensors.torch import load_file

from narrows.protocols import messages as m
from narrows.protocols.errors import IncompatibleError, NarrowsError, UsageError
from narrows.protocols.runtime.cli import flags
from narrows.protocols.runtime.cli.flags import RUN_FLAGS
from narrows.protocols.wire import VERSION, encode
from narrows.ps.command import cli as serve
from narrows.ps.command.serve import serve as serve_work
from narrows.ps.dashboard.run_registry import runs
from narrows.worker.command import cli as worker
from narrows.worker.command import script_variables
from narrows.worker.command.launcher import Launcher
from narrows.worker.command.managers import ManagerPlace
from narrows.worker.command.options import WorkerOptions, checked
from narrows.worker.integrations import ray_cities
from narrows.worker.runtime.member_link import tell_left
from narrows.worker.runtime.trace import PARTS

Refusal = tuple[int, str]
CLOSED = "tcp://127.0.0.1:1"


def sentence(said: str, name: str) -> str:
    """The one line that a command says about an error."""
    (line,) = sentences(said)
    assert line.startswith(f"{name}: ") and said.endswith("\n"), said
    return line.removeprefix(f"{name}: ")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script, and names it."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_server_that_nobody_stands_by_for_says_so_once(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving("--replicas", "1", "--record", str(record)) as server:
        rows: list[dict[str, Any]] = until(
            lambda: [row for row in map(json.loads, record.read_text().splitlines()) if row["event"] == "standby"],
            "the row",
        )
        text = f"no standby yet: start ps-serve --standby {server.address} on another machine"
        assert [(row["there"], row["text"]) for row in rows] == [(False, text)]
        assert server.command.out.count(f"ps-serve: {text}\n") == 1


# Wrong flags.


@pytest.mark.parametrize(("words", "why"), [
    ("--sync sometimes", "--sync sometimes: unknown mode; the modes are bsp, ssp, async, local"),
    ("--compress topk:0.01+int9", "stage 2, 'int9'"),
    ("--compress-down topk:7", "stage 1, 'topk:7'"),
    ("--sync bsp --staleness 2", "--staleness: --sync bsp has no staleness bound to set"),
    ("--sync async --staleness 2", "--staleness: --sync async has no staleness bound to set"),
    ("--staleness two", "'two' is not a valid integer"),
    ("--staleness -1", "--staleness -1: give a value that is not negative"),
    ("--outer-lr -1", "--outer-lr -1.0: give a value that is not negative"),
    ("--shards 0", "--shards 0: give a value from 1"),
    ("--shardz 2", "--shardz"),
    ("--bind 127.0.0.1:5555", "tcp://HOST:PORT"),
    ("--bind tcp://0.0.0.0:5555", "--insecure"),
    ("--bind tcp://127.0.0.1:65535 --shards 2", "65535 is the last"),
    ("--dashboard 0.0.0.0:5550", "--dashboard 0.0.0.0:5550: anyone who reaches it could read the figures"),
    ("--metrics nowhere", "--metrics nowhere: give a port, or HOST:PORT"),
    ("--resume", "name the folder with --checkpoint-dir"),
    ("--checkpoint-dir /dev/null/here", "--checkpoint-dir /dev/null/here"),
])  # fmt: skip
def test_what_ps_serve_cannot_take(words: str, why: str, tmp_path: Path) -> None:
    code, out, err = finished("ps-serve", *words.split(), cwd=tmp_path)
    assert code == 2 and why in sentence(err, "ps-serve") and not out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "why"), [
    ("", "name the script to run"),
    ("missing.py", "missing.py: there is no such script"),
    ("-n 0 SCRIPT", "-n 0: give at least 1"),
    ("--stalness 2 SCRIPT", "--stalness"),
    ("--device tpu SCRIPT", "--device tpu: auto, cpu or cuda[:i]"),
    ("--connect-timeout 0 SCRIPT", "--connect-timeout 0: give a positive number of seconds"),
    ("--sync sometimes SCRIPT", "--sync sometimes: unknown mode"),
    ("--sync bsp --staleness 2 SCRIPT", "--staleness: --sync bsp has no staleness bound to set"),
    ("--compress int8+nothing SCRIPT", "stage 2, 'nothing'"),  # the embedded server says it, once
    ("--workers 3 -n 2 SCRIPT", "--workers 3: the embedded server has the -n 2 of this command alone"),
    ("--record /dev/null/here SCRIPT", "--record /dev/null/here"),
    ("--server localhost:5555 SCRIPT", "tcp://HOST:PORT"),
    (f"--server {CLOSED} --resume SCRIPT", "--resume is for the embedded server"),
    (f"--server {CLOSED} --sync sometimes SCRIPT", "--sync sometimes: unknown mode"),
    (f"--server {CLOSED} --dashboard SCRIPT", "--dashboard is for the embedded server"),
])  # fmt: skip
def test_what_ps_worker_cannot_take(words: str, why: str, script: Callable[[str], str]) -> None:
    path = script("print('it ran')")
    code, out, err = finished("ps-worker", *words.replace("SCRIPT", path).split())
    assert code == 2 and why in sentence(err, "ps-worker") and not out


def test_ps_serve_serves_with_its_descriptors_closed(tmp_path: Path) -> None:
    """As a daemon may start it: a pipe to a shard must not become its stdin."""
    ready, flags = tmp_path / "ready", "--bind tcp://127.0.0.1:0 --checkpoint-dir none --ready-file"
    command = f'exec "$1" -P -m narrows.ps.command.cli {flags} "$2" <&- >&-'
    with subprocess.Popen(["sh", "-c", command, "sh", sys.executable, str(ready)]) as server:
        try:
            until(lambda: ready.exists() or server.poll() is not None, "ps-serve to serve")
            assert ready.exists()
        finally:
            server.terminate()
        assert server.wait(LIMIT_S) == 143


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = finished("ps-serve", "--bind", address, "--checkpoint-dir", "none")
    assert code == 2 and f"cannot listen on {address}" in sentence(err, "ps-serve")


def test_two_servers_in_one_folder(tmp_path: Path) -> None:
    """The second is refused while the first lives; one that was killed has left no lock."""
    folder = str(tmp_path / "run")
    with serving("--checkpoint-dir", folder) as first:
        assert "ps-serve: serves 1 shard, --sync ssp, staleness 1, --compress dense" in first.command.out
        assert f"ps-serve: checkpoints and the final model go to {folder}; on a worker machine:" in first.command.out
        with started("ps-serve", "--bind", "tcp://127.0.0.1:0", "--checkpoint-dir", folder, "--resume") as second:
            until(lambda: second.process.poll() is not None or "serves" in second.err, "the second to end")
            assert second.process.poll() == 2, second
            told = f"--checkpoint-dir {folder}: another ps-serve on this machine writes there; end it, or name another folder"
            assert told in second.err
        first.kill()
    with serving("--checkpoint-dir", folder, "--resume"):
        pass


def test_a_folder_with_another_runs_model_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("dear to somebody")
    code, _, err = finished("ps-serve", "--checkpoint-dir", str(tmp_path))
    assert code == 2 and "--resume, or name another folder" in sentence(err, "ps-serve")


# Help, and flags as variables.


@pytest.mark.parametrize(("module", "flags"), [
    ("narrows.ps.command.cli", "--bind --insecure --checkpoint-dir --resume --ready-file"),
    ("narrows.worker.command.cli", "--server --nproc --device --record --connect-timeout --server-timeout --checkpoint-dir -m"),
])  # fmt: skip
def test_help_comes_at_once(module: str, flags: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--help"],
        env=environment(), capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # a busy machine takes no more of these
    imported = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert "click" in imported and not imported & {"torch", "numba", "zmq"}
    for flag in (*flags.split(), *("--" + name.replace("_", "-") for name, *_ in RUN_FLAGS)):
        assert flag in said.stdout, flag


@pytest.mark.parametrize(("command", "args"), [(serve.command, []), (worker.command, ["script.py"])])
def test_every_flag_has_a_variable_and_wins_over_it(
    command: click.Command, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.core import ParameterSource

    options = [option for option in command.params if isinstance(option, click.Option) and option.expose_value]
    for option in options:
        value = option.type.choices[0] if isinstance(option.type, click.Choice) else "1"
        monkeypatch.setenv(f"NARROWS_{max(option.opts, key=len).lstrip('-').replace('-', '_').upper()}", value)
    monkeypatch.setenv("NARROWS_MODULE", "1")  # -m has no long name
    with command.make_context("it", [*args], **command.context_settings) as context:
        for option in options:
            assert option.name is not None
            assert context.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT, option.name
    with command.make_context("it", ["--staleness", "5", *args], **command.context_settings) as context:
        assert context.params["staleness"] == 5


ABOVE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}  # of torchrun


@pytest.mark.parametrize(("flags", "above", "told"), [
    (["--rank-variables"], {}, ["0 0 0 2 none 0", "1 1 1 2 none 1"]),
    (["--rank-variables"], ABOVE, ["10 10 2 16 none 2", "11 11 3 16 none 3"]),
    ([], {}, ["none none none none none 0", "none none none none none 1"]),
    ([], ABOVE, ["none none none none none 2", "none none none none none 3"]),
])  # fmt: skip
def test_ranks_are_those_of_the_launcher_above_and_shown_where_they_are_asked_for(
    flags: list[str], above: dict[str, str], told: list[str], script: Callable[[str], str]
) -> None:
    path = script(
        "import os\nfrom narrows.worker import local_rank\n"
        "names = 'RANK', 'GLOBAL_RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'\n"
        "print(*(os.environ.get(name, 'none') for name in names), local_rank())"
    )
    code, out, _ = finished("ps-worker", "--server", CLOSED, "-n", "2", *flags, path, env=above)
    assert code == 0 and sorted(out.splitlines()) == told


@pytest.mark.parametrize(("flag", "group", "there", "seen"), [
    ("auto", False, "", ["auto:all", "auto:all", "auto:all"]),
    ("auto", False, "01", ["auto:0", "auto:1", "auto:0"]),
    ("cuda", False, "01", ["cuda:0", "cuda:1", "cuda:0"]),
    ("cuda:1", False, "01", ["cuda:1", "cuda:1", "cuda:1"]),
    ("cuda:7", False, "01", ["cuda:7:all"] * 3),  # torch says that there is none
    ("cpu", False, "01", ["cpu:"] * 3),
    ("cuda", True, "01", ["cuda:0:all", "cuda:1:all", "cuda:0:all"]),
])  # fmt: skip
def test_each_copy_sees_its_own_gpu(flag: str, group: bool, there: str, seen: list[str], tmp_path: Path) -> None:
    assert [shown(script_variables.device(flag, index, 3, group, [*there])) for index in range(3)] == seen
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert script_variables.gpus({}, tmp_path) == ["0", "1"] and script_variables.gpus({}, tmp_path / "none") == []
    assert script_variables.gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-5"}, tmp_path) == ["3", "GPU-5"]
    assert script_variables.gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_no_flag_of_ps_worker_is_dropped() -> None:
    """A flag without a field of `WorkerOptions` would be: `checked` takes those that it names."""
    told = {"check", "link", *inspect.signature(checked).parameters} - {"flags"}
    taken = told | {each.name for each in dataclasses.fields(WorkerOptions)} | {name for name, *_ in RUN_FLAGS}
    dropped = [each.name for each in worker.command.params if each.expose_value and each.name not in taken]
    assert not dropped, f"give WorkerOptions fields of these names, and `checked` their checks: {dropped}"


def test_no_flag_of_ps_serve_is_dropped() -> None:
    """A flag that is neither a parameter of `serve` nor a flag of a run would be: `given` takes those of a run."""
    told = {"print", "plan", "host", *inspect.signature(serve_work).parameters} - {"flags"}
    taken = told | {name for name, *_ in RUN_FLAGS}
    dropped = [each.name for each in serve.command.params if each.expose_value and each.name not in taken]
    assert not dropped, f"give serve() parameters of these names: {dropped}"


def test_keywords_are_flags() -> None:
    told = {"sync": "local", "quorum": None, "staleness": 2, "grace": 1, "journal": False}
    values = flags.as_given(told, ("journal",))
    assert values == {"sync": "local", "staleness": 2, "grace": 1.0, "journal": False}
    words = flags.words(values)
    assert words == ["--sync", "local", "--staleness", "2", "--grace", "1.0", "--no-journal"]
    with serve.command.make_context("ps-serve", words, **serve.command.context_settings) as context:
        assert context.params.items() >= values.items()


@pytest.mark.parametrize(("values", "why"), [
    ({"qourum": 2}, "qourum: ps-serve has no such flag of a run; quorum is one"),
    ({"nothing_like_it": None}, "nothing_like_it: ps-serve has no such flag of a run"),
    ({"quorum": True}, "quorum=True: give a value"),
    ({"journal": 1}, "journal=1: give True or False"),
    ({"staleness": 2.5}, "staleness=2.5: '2.5' is not a valid integer"),
    ({"lease": "long"}, "lease='long': 'long' is not a valid float"),
])  # fmt: skip
def test_keywords_that_are_no_flags(values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(why)}"):
        flags.as_given(values, ("journal",))


@pytest.mark.parametrize(("told", "why"), [
    ({"workers": (2, 1)}, r"^workers=\(2, 1\): give 1 <= low <= high"),
    ({}, "^workers: give how many"),
    ({"clusters": [{"workers": 1}, {}]}, r"^clusters\[1\]: workers: give how many"),
    ({"workers": 1, "clusters": [{"labels": {}}, {"workers": 0}]}, r"^clusters\[1\]: workers=\(0, 0\)"),
    ({"workers": 1, "clusters": [{"city": "jena"}]}, r"^clusters\[0\] has 'city': write a cluster as"),
    ({"workers": 1, "room_s": 0}, "^room_s=0: give more than 0 s"),
    ({"workers": 1, "qourum": 2}, "^qourum: ps-serve has no such flag of a run; quorum is one"),
    ({"workers": 1, "sync": "sometimes"}, "^--sync sometimes: unknown mode"),
    ({"workers": 1, "sync": "local", "quorum": 2}, "quorum"),
])  # fmt: skip
def test_what_train_on_ray_cannot_take_is_said_before_anything_is_started(told: dict[str, Any], why: str) -> None:
    def take(clusters: Any = (), workers: Any = None, room_s: float = 1.0, **run: Any) -> None:
        ray_cities.cities_of(clusters, workers, None)
        ray_cities.RayLimits(1.0, room_s, 1.0)
        ray_cities.run_flags(run, workers=1, shards=1)

    with pytest.raises(UsageError, match=why):
        take(**told)


def test_a_function_is_called_by_its_name(script: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="a function that stands at the top of a file"):
        ray_cities.command_of(lambda: None, ())
    assert ray_cities.command_of(finished, ["7"])[1:] == [
        "narrows.worker.integrations.function_entry",
        inspect.getsourcefile(finished),
        "finished",
        "7",
    ]


def test_each_city_has_its_own_workers() -> None:
    told: list[dict[str, Any]] = [{"labels": {"city": "leipzig"}, "workers": 3}, {"labels": {"city": "jena"}}]
    found = ray_cities.cities_of(told, (1, 2), {"role": "server"})
    assert [(city.low, city.high, city.labels["city"]) for city in found] == [(3, 3, "leipzig"), (1, 2, "jena")]
    assert ray_cities.cities_of((), 2, {"role": "any"}) == [ray_cities.RayCity(2, 2, {"role": "any"})]


def shown(found: tuple[str, dict[str, str]]) -> str:
    device, seen = found
    return f"{device}:{seen.get('CUDA_VISIBLE_DEVICES', 'all')}"


@pytest.mark.parametrize(("flag", "group", "there", "copies", "sizes", "seen"), [
    ("auto", False, "0123", 1, 4, ["auto:0", "auto:1", "auto:2", "auto:3"]),
    ("cuda", False, "0123", 2, 2, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("auto", False, "01", 1, 4, ["auto:0", "auto:1", "auto:0", "auto:1"]),
    ("auto", False, "3", 1, 2, ["auto:3", "auto:3"]),  # a manager has cut them: each task sees its own
    ("auto", False, "", 1, 2, ["auto:all", "auto:all"]),
    ("cpu", False, "01", 1, 2, ["cpu:", "cpu:"]),
    ("cuda", True, "0123", 2, 2, ["cuda:0:0,1", "cuda:1:0,1", "cuda:0:2,3", "cuda:1:2,3"]),
    ("auto", True, "0123", 2, 2, ["auto:0,1", "auto:0,1", "auto:2,3", "auto:2,3"]),
    ("auto", True, "01", 2, 2, ["auto:all"] * 4),  # of two that each task sees
    ("cuda:1", True, "0123", 2, 2, ["cuda:1:all"] * 4),
])  # fmt: skip
def test_ps_workers_that_a_manager_starts_on_one_machine_share_its_gpus(
    flag: str, group: bool, there: str, copies: int, sizes: int, seen: list[str]
) -> None:
    found = [
        script_variables.device(
            flag, index, copies, group, [*there], ManagerPlace("Slurm", None, rank, local_size=sizes)
        )
        for rank in range(sizes)
        for index in range(copies)
    ]
    assert [*map(shown, found)] == seen


def test_what_slurm_says_of_a_machine_reaches_the_copies(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    above = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    for name, value in (above | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}).items():
        monkeypatch.setenv(name, value)
    path = script("pass")
    command = worker.command
    with command.make_context(
        "ps-worker", ["--server", CLOSED, "-n", "2", path], **command.context_settings
    ) as context:
        flags = {name: value for name, value in context.params.items() if name not in ("check", "link")}
    launcher = Launcher(checked(**flags))
    try:
        own = [launcher._own_environment(index) for index in range(2)]
    finally:
        launcher.children.close()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in own] == ["6", "7"]


# Servers that are none, or another's. Commands start at once, since most of their time goes into importing torch.


@contextmanager
def answering(*reply: list[bytes]) -> Iterator[str]:
    """A ZeroMQ ROUTER that answers everything with the same frames."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        over = threading.Event()

        def answer() -> None:
            while not over.is_set():
                if router.poll(50):
                    peer = router.recv_multipart()[0]
                    for frames in reply:
                        router.send_multipart([peer, *frames])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            over.set()
            thread.join()


@contextmanager
def speaking_http() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(64)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


REFUSALS: dict[str, Refusal] = {
    "another mode": (5, "--sync bsp contradicts the server, which runs --sync ssp"),
    "another run": (
        5,
        "--name oslo: the run of this server has no name: leave --name out to join it, or start its server",
    ),
    "another model": (5, "tensor '0.weight' is float32[3, 6], the run has '0.weight' as float32[8, 6]"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, float]]]:
    """Exit code, stderr and seconds of a ps-worker for each of REFUSALS."""
    path = tmp_path_factory.mktemp("refusals") / "script.py"
    path.write_text(
        "import torch\n"
        "from narrows.worker import DistributedOptimizer\n"
        "model = torch.nn.Sequential(torch.nn.Linear(6, 3))\n"
        "DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)\n"
    )
    with ExitStack() as stack:
        server = stack.enter_context(serving())
        stack.enter_context(Worker(server.address))
        addresses = {
            "another mode": [server.address, "--sync", "bsp"],
            "another run": [server.address, "--name", "oslo"],
            "another model": [server.address],
        }
        began = time.monotonic()
        timeout = ("--connect-timeout", "1")
        commands = {
            name: stack.enter_context(started("ps-worker", *timeout, "--server", *words, "-n", "1", str(path)))
            for name, words in addresses.items()
        }
        yield {name: (each.wait(), each.err, time.monotonic() - began) for name, each in commands.items()}


def test_a_named_run_admits_those_that_name_it_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving("--name", "oslo", "--record", str(tmp_path / "run.jsonl")) as server:
        cluster = ("ps-serve", "--bind", "tcp://127.0.0.1:0", "--checkpoint-dir", "none", "--parent", server.address)
        guest = ("ps-serve", "--bind", "tcp://127.0.0.1:0", "--join", server.address)
        with started(*cluster, "--name", "jena") as other, started(*guest, "--name", "jena") as joins:
            with pytest.raises(IncompatibleError, match="has the name oslo, and no --name was given here"):
                Worker(server.address)
            monkeypatch.setenv("NARROWS_NAME", "oslo")
            with Worker(server.address) as worker:
                for each in (other, joins):
                    assert each.wait() == 5
                    assert "--name jena: the run of this server has the name oslo: give --name oslo" in each.err
                worker.step()
                seen = until(
                    lambda: [each for each in runs() if each.clock == 1], "the entry of the run, with its clock"
                )
                assert [(each.name, each.address, each.workers) for each in seen] == [("oslo", server.address, 1)]
        assert server.command.wait() == 0
        assert server.address not in {each.address for each in runs()}
        assert f"ps-worker --server {server.address} --name oslo SCRIPT.py" in server.command.out
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if line["event"] == "run"] == ["oslo"]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_server_that_cannot_be_joined(name: str, refusals: dict[str, tuple[int, str, float]]) -> None:
    code, why = REFUSALS[name]
    got, said, _ = refusals[name]
    first, last = sentences(said)
    assert got == code and why in sentence(first + "\n", "ps-worker"), said
    assert last.startswith("0 of 1 workers done")


def test_an_address_that_is_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a script, in this process."""
    monkeypatch.setenv("NARROWS_CONNECT_TIMEOUT", "1")
    silence = (3, "no server answered within 1 s")
    header = bytes(encode(m.LeaveAck("token"))[0])
    newer = header.replace(b"NRWS" + bytes((VERSION,)), b"NRWS" + bytes((VERSION + 1,)), 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        speaking_http() as http,
        answering([b"junk"]) as junk,
        answering([newer]) as later,
    ):
        for address, (code, text) in (
            (CLOSED, silence),
            (f"tcp://127.0.0.1:{silent.getsockname()[1]}", silence),
            (http, silence),
            (junk, (5, "the peer does not speak the Narrows protocol")),
            (later, (5, f"protocol version {VERSION + 1}, this one speaks {VERSION}")),
        ):
            with pytest.raises(NarrowsError, match=text) as error:
                Worker(address)
            assert error.value.exit_code == code


# Runs.


def test_a_failing_worker_is_named_and_the_others_finish(script: Callable[[str], str]) -> None:
    path = script(
        SCRIPT % "if step_count() == 3: own_end(int(os.environ['NARROWS_LOCAL_RANK']))" + "print('finished')\n"
    )
    path = script("def own_end(index):\n    if index == 1: raise ValueError('boom')\n    if index == 2: sys.exit(7)\n"
                  + Path(path).read_text())  # fmt: skip
    code, out, err = finished("ps-worker", "-n", "3", "--sync", "bsp", "--push", "update", path, "30")
    assert code == 1 and out == "finished\n"
    assert "local rank 1: ValueError: boom" in err and f'local rank 1:   File "{path}", line' in err
    assert "ps-worker: local rank 1 failed with exit code 1" in err
    assert "ps-worker: local rank 2 failed with exit code 7" in err
    assert "\n1 of 3 workers done in" in err


def test_the_record_is_what_the_design_says(tmp_path: Path) -> None:
    module = (
        SCRIPT
        % "assert os.environ['RANK'] == os.environ['GLOBAL_RANK'] == str(rank()) and os.environ['WORLD_SIZE'] == '2'"
    )
    (tmp_path / "my_module.py").write_text(module + "record(accuracy=rank())\nprint(sys.argv[1:])\n")
    flags = "-n 2 --shards 2 --sync ssp --staleness 1 --compress topk:0.5+int8 --record run.jsonl --rank-variables"
    flags += " -m my_module 20 --workers 9"
    code, out, err = finished("ps-worker", *flags.split(), cwd=tmp_path)
    assert code == 0 and out == "['20', '--workers', '9']\n" * 2, err
    assert re.search(r"^\[ *\d+\.\d s\] clock \d+ .*loss \d", err, re.M) and "\x1b" not in err  # plain progress
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    noted = [event["what"] for event in events if event["event"] == "server"]
    assert set(noted) <= {"waits"}  # for whom, until all have joined
    events = [event for event in events if event["event"] != "server"]
    seconds = [event.pop("seconds") for event in events]
    assert seconds == sorted(seconds) and 0 < seconds[0] < LIMIT_S
    kinds = [event.pop("event") for event in events]
    assert kinds[0] == "start" and kinds[-1] == "done" and set(kinds[1:-1]) == {"member", "step", "links"}
    assert [event["ways"] for event in events if "ways" in event] == [["shared memory"] * 2] * 2
    events, kinds = [event for event in events if "ways" not in event], [kind for kind in kinds if kind != "links"]

    start, *between, done = events
    versions = start.pop("versions")
    about = {
        "mode": "ssp",
        "compress": "topk:0.5+int8",
        "workers": 2,
        "shards": 2,
        "local_steps": 1,
        "local_seconds": -1.0,
        "fragments": 1,
        "name": "",
    }
    assert start == about | {"parameters": 10}
    assert {"python", "narrows", "torch"} <= set(versions)
    members = [
        (event["how"], event["local_rank"])
        for event, kind in zip(between, kinds[1:-1], strict=True)
        if kind == "member"
    ]
    assert sorted(members) == [("joined", 0), ("joined", 1), ("left", 0), ("left", 1)]
    for index in (0, 1):
        own = [event for event in between if event["local_rank"] == index and "how" not in event]
        assert [event["clock"] for event in own] == list(range(1, 21))
        for event in own:
            assert event.keys() - {"gain", "agreement"} == {
                *("held_back", "local_rank", "clock", "push_bytes", "pull_bytes", "wait_seconds", "staleness", "loss"),
                *(f"{name}_seconds" for name in ("step", "encode", "script", "difference", "fold", "compose")),
                *(["accuracy"] if event["clock"] == 20 else []),
            }
            assert 0 <= event["staleness"] <= 1
            parts = [event[f"{name}_seconds"] for name in PARTS]
            assert min(parts) >= 0 and sum(parts) <= event["step_seconds"] + 1e-5
        assert all(sum(event[f"{name}_seconds"] for event in own) > 0 for name in PARTS)
    told = (
        "steps",
        "bytes_up",
        "bytes_down",
        "raw_bytes_up",
        "raw_bytes_down",
        "edge_bytes_up",
        "edge_bytes_down",
        "dropped",
        "skipped",
        "exit_codes",
        "last",
    )
    assert done.keys() == {*told} and done["dropped"] == {}
    assert done["steps"] == 40 and done["exit_codes"] == [0, 0] and done["raw_bytes_up"] == 40 * 10 * 4
    assert done["bytes_up"] >= sum(event.get("push_bytes", 0) for event in between) > 0
    assert done["last"]["accuracy"] == 0.5 and done["last"]["loss"] > 0
    assert not (tmp_path / "checkpoints").exists()  # of an embedded server only where asked for


MIXED = """
import sys, torch
from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
matrices, biases = [[p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False)]
muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=0.02)
optimizer = DistributedOptimizer([muon, adamw], model, max_grad_norm=1.0)
while (step := step_count()) < 40:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * (1 - step / 40)
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))[rank()::world_size()]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    loss.backward()
    optimizer.step()
    record(loss=loss.item())
optimizer.finish()
with optimizer.shared():
    torch.save(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), f"{sys.argv[1]}/{rank()}")
"""


def traced(record: Path, out: Path) -> int:
    """Write the trace of a record, and check it. Returns the number of updates that a flow leads along to the end."""
    code, said, err = finished("ps-plot", "--trace", str(record), str(out))
    assert code == 0 and said.strip() == str(out), err
    events = checked_trace(out.read_text())
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(named) == 4 and sum(name.startswith("worker ") for name in named) == 2
    labels = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert all(label.startswith("clock within ") for label in labels)
    return len(flows(events))


def test_two_workers_with_muon_and_adamw(script: Callable[[str], str], tmp_path: Path) -> None:
    flags = ("-n", "2", "--shards", "2", "--sync")
    path, record = script(MIXED), tmp_path / "record.jsonl"
    ssp = (*flags, "ssp", "--compress", "topk:0.05+int8", "--record", str(record), "--trace", "4")
    code, _, err = finished("ps-worker", *ssp, path, str(tmp_path))
    assert code == 0, err
    assert torch.equal(torch.load(tmp_path / "0"), torch.load(tmp_path / "1"))
    steps = [event for line in record.read_text().splitlines() if (event := json.loads(line))["event"] == "step"]
    assert len(steps) == 80
    assert sum(step["loss"] for step in steps[-10:]) < 0.8 * sum(step["loss"] for step in steps[:10])
    # After the last step each worker pushes what compression has held back, as the update of clock 40.
    assert traced(record, tmp_path / "out.json") == (sum(step["clock"] % 4 == 1 for step in steps) + 2) * 2
    code, _, err = finished("ps-worker", *flags, "bsp", path, str(tmp_path))
    said = [
        line for line in sentences(err) if "Muon is not elementwise, and shards cut tensors: use --push update" in line
    ]
    assert code == 2 and said and "Traceback" not in err, err
    code, _, err = finished("ps-worker", *flags, "bsp", "--cut", "tensors", path, str(tmp_path))
    assert code == 0, err
    assert torch.equal(torch.load(tmp_path / "0"), torch.load(tmp_path / "1"))


LIVE_STEPS = 400  # so many that ps-worker updates its live line in between; a run of 30 steps has ended before that


def test_progress_is_one_live_line_on_a_terminal(script: Callable[[str], str]) -> None:
    path = script(SCRIPT % "print('a bar\\rstep', step_count())")
    ours, theirs = pty.openpty()
    env, said = {"TERM": "xterm", "COLUMNS": "100"}, b""
    with open(ours, "rb"), started("ps-worker", "-n", "2", path, str(LIVE_STEPS), env=env, terminal=theirs) as command:
        os.close(theirs)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and select.select([ours], [], [], deadline - time.monotonic())[0]:
            try:
                said += os.read(ours, 1 << 16)
            except OSError:  # its end, where it is a terminal
                break
        assert command.wait() == 0
    assert re.search(rb"\] clock \d+ .*loss \d.*\r(\x1b\[1A)?\x1b\[2K", said, re.S), said  # shown, and taken back
    assert b"a bar" not in said  # what a script's own bar ended with is its line
    assert b"importing torch ..." in said.partition(b"] clock ")[0]  # from the start
    lines = re.sub(rb"\x1b\[[0-9?;]*[a-zA-Z]", b"", said).replace(b"\r", b"\n").decode().split("\n")
    for index in (0, 1):  # each line says whose it is, on a terminal
        own = [line for line in lines if line.startswith(f"local rank {index}: step ")]
        assert own == [f"local rank {index}: step {step}" for step in range(LIVE_STEPS)]
    assert any(line.startswith("2 of 2 workers done") for line in lines)


def test_a_breakpoint_talks_to_the_terminal(script: Callable[[str], str]) -> None:
    """Though the script's stdout is a pipe of ps-worker; nothing of the run's progress is in between."""
    path = script(SCRIPT % "mine = 40 + step_count()\n    if step_count() == 2: breakpoint()")
    ours, theirs = pty.openpty()
    said, asked = b"", [(b"(Pdb) ", b"p 'it is', mine\n"), (b"('it is', 42)", b"c\n")]
    with open(ours, "rb"), started("ps-worker", path, "3", env={"TERM": "dumb"}, terminal=theirs) as command:
        os.close(theirs)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and select.select([ours], [], [], deadline - time.monotonic())[0]:
            try:
                said += os.read(ours, 1 << 16)
            except OSError:
                break
            if asked and asked[0][0] in said:
                os.write(ours, asked.pop(0)[1])
        assert command.wait() == 0 and not asked, said
    assert b"a worker is in the debugger" in said and b"] clock" not in said.partition(b"(Pdb) ")[2], said


def test_two_machines_that_come_one_after_the_other(tmp_path: Path) -> None:
    """README: ps-serve, then a ps-worker each; the server's model is the one that the last to finish reported on."""
    digits = str(ROOT / "bench" / "tasks" / "digits.py")
    flags = "--shards 2 --workers 2 --sync async"
    with serving(*flags.split(), cwd=tmp_path) as server, ExitStack() as stack:
        command = server.command
        assert f"\n    ps-worker --server {server.address} SCRIPT.py\n" in command.out
        words = ("ps-worker", "--server", server.address, digits, "--steps", "40")
        first = stack.enter_context(started(*words))
        until(lambda: "worker 0 (rank 0" in command.out or first.process.poll() is not None, "the first to join")
        workers = [first, stack.enter_context(started(*words))]
        assert [worker.wait() for worker in workers] == [0, 0], [str(worker) for worker in workers]
        assert command.wait() == 0, command
        left = re.findall(r"\(rank (\d), .*\) left at clock", command.out)
        path = re.search(
            r"^ps-serve: the model at clock 40 is in (checkpoints/\S+/model\.safetensors)$", command.out, re.M
        )
        assert path, command
        said = re.findall(r"test accuracy (\S+) \(rank (\d)\)", "".join(worker.out for worker in workers))
        reported = {rank: accuracy for accuracy, rank in said}
    assert float(reported[left[-1]]) == pytest.approx(accuracy_of(tmp_path / path[1]), abs=1e-4)


def accuracy_of(model_file: Path) -> float:
    from kit.tasks import load

    task: Any = load("digits")
    _, test_x, _, test_y = task.digits()
    model = task.build_model()
    model.load_state_dict(load_file(model_file))
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).float().mean())


def test_a_launcher_that_gives_up_on_a_worker_says_so(script: Callable[[str], str]) -> None:
    """A worker that died before it joined is not waited for (as ps-worker tells the coordinator)."""
    with serving("--workers", "2") as server:
        tell_left(server.address, "of a worker that never came")
        with Worker(server.address) as alone:
            alone.step()
            assert alone.clock == 1


def test_start_and_end_cost_what_readme_says(tmp_path: Path) -> None:
    """With n workers and a lossy SPEC both ways: 1 + 0.38 n models up and n - 1 + 0.38 n down."""
    (tmp_path / "train.py").write_text((SCRIPT % "").replace("Linear(4, 2)", "Linear(4, 60_000)"))
    flags = ("--sync", "ssp", "--compress", "topk:0.001+int8")
    code, _, said = finished("ps-worker", "-n", "2", *flags, "train.py", "3", cwd=tmp_path)
    models = re.search(r"\((\S+) and (\S+) models\)$", said)
    assert code == 0 and models, said
    assert all(1.4 <= float(each) <= 1.8 for each in models.groups()), said  # lz4 shortens biases without a gradient


def test_workers_of_one_command_have_a_folder_in_which_the_first_tells_the_others(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os\nfrom narrows.worker import local_rank\nfrom narrows.worker.runtime.device import from_first\n"
        "print(os.environ['NARROWS_MACHINE_DIR'], from_first('best', f'of {local_rank()}'))"
    )
    code, out, err = finished("ps-worker", "--server", "tcp://127.0.0.1:1", "-n", "2", str(path))
    (folder,) = {line.partition(" ")[0] for line in out.splitlines()}
    assert code == 0 and out.splitlines() == 2 * [f"{folder} of 0"], err
    assert not Path(folder).exists(), "it goes with the command"
