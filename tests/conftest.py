"""Fixtures that many tests ask for by name."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kit.s3 import Bucket

os.environ.setdefault("NARROWS_CUDA_COMPILER", "1")  # before kernels are imported: tests compile them in this process
os.environ["NARROWS_RUNS"] = tempfile.mkdtemp(prefix="narrows_runs")  # not the user's own runs
atexit.register(shutil.rmtree, os.environ["NARROWS_RUNS"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads of pytest's workers would spin

# Started by nohup or in the background of a script, pytest ignores these signals. Commands would inherit that; of a handler,
# they inherit nothing.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

with contextlib.suppress(ImportError):  # the environment of examples has no hypothesis
    from hypothesis import settings

    # Its deadline is of the wall: on a busy machine any example may miss it. Tests have a limit of their own.
    settings.register_profile("narrows", deadline=None)
    settings.load_profile("narrows")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported and collected objects are no garbage: a simulated run makes much, and each search for it would visit them. While
    they are made, nothing is searched: that was a fifth of a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


WAITING = "system"  # the folder of tests that start commands and wait for them, for the most part
FOLDERS = ("runs", "simulation", "bench")  # of tests that compute, the longest first; all others come after
LONG = {
    "test_kernels_equal_the_cpu_in_the_simulator",
    "test_under_bounds_checks",
}  # half a minute each, in other folders
SHARED = {"attacked", "refusals", "forks", "children"}  # fixtures of a module that start processes: made once
TOGETHER = {"test_cuda_ptx.py", "test_layout.py"}  # a test compiles or parses what the others need too


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that carry the mark `gpu` where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for tests that need none

        if not torch.cuda.is_available():
            pytest.skip(f"needs an NVIDIA GPU; torch {torch.__version__} sees none")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _rank(item: pytest.Item) -> int:
    """Return the place of a computing item in the order: 0 is first."""
    folder = _folder(item)
    return FOLDERS.index(folder) if folder in FOLDERS else 0 if item.name in LONG else len(FOLDERS)


def _mixed(one: list[list[pytest.Item]], other: list[list[pytest.Item]]) -> list[list[pytest.Item]]:
    """Spread both lists evenly over one list, each in its own order."""
    placed = [((at + 0.5) / len(part), which, at) for which, part in enumerate((one, other)) for at in range(len(part))]
    return [(one, other)[which][at] for _, which, at in sorted(placed)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests to the processes of xdist.

    xdist cuts the list into as many parts as it has processes. A process that has done its part steals from the end of
    another. Each part takes tests that wait and tests that compute in turn: while one process waits, another computes.
    Long tests come first, so that none begins when all others have ended.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    groups: dict[object, list[pytest.Item]] = {}
    for item in sorted(items, key=_rank):
        shared = SHARED & {*getattr(item, "fixturenames", ())} | TOGETHER & {item.path.name}
        groups.setdefault((item.path, *shared) if shared else item, []).append(item)
    waiting = [group for group in groups.values() if _folder(group[0]) == WAITING]
    computing = [group for group in groups.values() if _folder(group[0]) != WAITING]
    items[:] = [
        item
        for first in range(processes)
        for group in _mixed(waiting[first::processes], computing[first::processes])
        for item in group
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the commands of a failed test printed: pytest cuts the text of an assertion to 240 characters."""
    report = yield
    if (processes := sys.modules.get("kit.processes")) is not None:
        if report.failed:
            report.sections += [("output of a command", text) for text in processes.ENDED]
        if report.when == "teardown":
            processes.ENDED.clear()
    return report


@pytest.fixture(scope="module")
def no_collection() -> Iterator[None]:
    """For tests that make large trees and no garbage: each search for garbage would visit the trees. Of a parse that is three
    quarters of the time, of a compilation a seventh."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch's sums depend on its number of threads; workers have one."""
    import torch  # not for tests that need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that a benchmark starts are forked, as commands of tests are: none of them imports torch again."""
    from kit import command_forker  # not for tests that need none

    monkeypatch.setattr("subprocess.Popen", command_forker.popen)


@pytest.fixture(scope="session")
def kept_for_kernels(pytestconfig: pytest.Config) -> Path:
    """A folder for kernels that are compiled from compression/, 13 s of a core. Pytest keeps the folder while no source and no
    compiler changes."""
    tests = Path(__file__).resolve().parent
    compilers = ("numba", "llvmlite", "numpy", "cuda-", "nvidia-")
    installed = sorted({f"{each.name} {each.version}" for each in distributions() if each.name.startswith(compilers)})
    parts = [" ".join([sys.version, *installed]).encode()]
    parts += [path.read_bytes() for path in sorted((tests.parent / "compression").rglob("*.py"))]
    cache = pytestconfig.cache
    assert cache is not None
    folder = cache.mkdir("narrows-kernels") / hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    for old in folder.parent.iterdir():
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)  # another process of xdist removes it too
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server on loopback."""
    from kit import s3  # not for tests that need none

    with s3.served() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket of that server, which this process and its commands reach by its address."""
    import boto3
    from kit import s3

    for name, value in (s3.VARIABLES | {"AWS_ENDPOINT_URL": s3_server}).items():
        monkeypatch.setenv(name, value)
    return s3.Bucket(boto3.client("s3"), f"test-{uuid.uuid4().hex[:12]}")
