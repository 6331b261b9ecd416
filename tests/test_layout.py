"""The house rules: arrows between the packages, who may import what, and the map that installs them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocols", "compression", "ps", "worker")

# package -> what it may import of the others; folders that are no package (tests, bench) may import all.
ARROWS = {
    "protocols": set[str](),
    "compression": set[str](),
    "ps": {"protocols", "compression"},
    "worker": {"protocols", "compression"},
}

# module -> files and folders that may import it; a rule for the packages, not for tests and bench.
OWNERS = {
    "zmq": ("protocols/runtime/sockets.py", "protocols/runtime/curve.py", "protocols/runtime/sealing.py"),
    "torch": ("ps/optimizers.py", "worker/"),
    "pickle": ("ps/process/pickling.py",),  # narrowed there to classes of ours: a standby reads what its server sends
    "cloudpickle": (),
    "ray": ("worker/ray.py", "worker/keeper.py"),
    "marshal": (),
    "shelve": (),
}

RUNTIME = "protocols/runtime/"  # sockets, children, flags: what runs machines, and is none
RUNNERS = (
    *("ps/process/", "ps/command/", "worker/command/", "worker/pipelining/"),
    *(
        "worker/runner.py",
        "worker/hub.py",
        "worker/session.py",
        "worker/telling.py",
        "worker/keeper.py",
        "worker/child_process.py",
        "worker/ray.py",
        "worker/moments.py",  # files of a worker
        "worker/gossip_checkpoints.py",
        "worker/resuming.py",
    ),
    *("ps/glance/watch.py", "ps/glance/web.py"),  # the process of ps-serve: its record and its pages
)

# Modules that a deterministic machine cannot use: sockets, threads, clocks, files, processes, randomness, logs.
IMPURE = {
    *("socket", "socketserver", "select", "selectors", "ssl", "http", "urllib", "zmq"),
    *("threading", "_thread", "asyncio", "concurrent", "queue", "sched", "signal", "multiprocessing", "subprocess"),
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "fileinput", "mmap", "sqlite3", "logging"),
    *("torch", "numba"),
}


def imported_names(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in `source`, wherever it stands; relative ones are made absolute.

    `from a.b import c` yields a.b.c: c may be a module, and where it is none the name says so much more.
    """
    folders = path.split("/")[:-1]
    package = ["narrows", *folders] if folders[0] in PACKAGES else folders
    for node in ast.walk(ast.parse(source, path)):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module, names, level):
                base = package[: len(package) - (level - 1)] if level else []
                stem = [*base, *(module.split(".") if module else [])]
                yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in names)
            case ast.Call(ast.Name("__import__" | "import_module") | ast.Attribute(_, "import_module"), [first, *_]):
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield node.lineno, first.value


def complaint(path: str, name: str) -> str | None:
    """Why the file at `path` must not import `name`, or None."""
    here = path.split("/")[0]
    parts = name.split(".")
    top = parts[0]
    if top in (*PACKAGES, "tests", "bench"):
        return f"'{top}' is no top-level module: say narrows.{top}" if top in PACKAGES else f"'{top}' is not installed"
    if top == "narrows" and (len(parts) == 1 or parts[1] not in PACKAGES):
        return "'narrows' is a namespace: import from one of its packages"
    if here not in PACKAGES:
        return None
    if top == "narrows" and parts[1] != here and parts[1] not in ARROWS[here]:
        return f"{here} must not import {parts[1]}"
    if top in OWNERS and not any(
        path == owner or (owner.endswith("/") and path.startswith(owner)) for owner in OWNERS[top]
    ):
        return f"{top} may be imported only in {', '.join(OWNERS[top]) or 'no file'}"
    if path.startswith(RUNTIME):
        return None
    if here == "protocols" and top in IMPURE:
        return f"protocols is pure and must not import {top}"
    if name.startswith("narrows.protocols.runtime") and not path.startswith(RUNNERS):
        return "protocols.runtime is impure: only what runs the machines may import it"
    return None


def complaints(path: str, source: str) -> list[str]:
    found = [(line, complaint(path, name)) for line, name in imported_names(path, source)]
    return [f"{path}:{line}: {why}" for line, why in found if why]


def sources() -> list[Path]:
    return sorted(file for folder in (*PACKAGES, "tests", "bench") for file in (ROOT / folder).rglob("*.py"))


def test_no_forbidden_import() -> None:
    files = sources()
    assert {file.relative_to(ROOT).parts[0] for file in files} >= set(PACKAGES)
    found = [line for file in files for line in complaints(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n".join(found)


FORBIDDEN = [
    ("ps/shard.py", "from narrows.worker import rank", "ps must not import worker"),
    ("worker/session.py", "import narrows.ps.command.cli", "worker must not import ps"),
    ("worker/session.py", "def f():\n    from narrows import ps", "worker must not import ps"),
    (
        "worker/launch.py",
        "import importlib\nimportlib.import_module('narrows.ps.command.cli')",
        "worker must not import ps",
    ),
    ("protocols/wire.py", "from narrows.compression import parse", "protocols must not import compression"),
    ("protocols/wire.py", "from ..ps import cli", "protocols must not import ps"),
    ("compression/kernels/cpu.py", "from ...protocols import wire", "compression must not import protocols"),
    ("compression/spec.py", "from .. import worker", "compression must not import worker"),
    ("compression/spec.py", "if TYPE_CHECKING:\n    import narrows.worker", "compression must not import worker"),
    ("ps/shard.py", "from protocols.wire import encode", "'protocols' is no top-level module"),
    ("tests/test_spec.py", "import compression", "'compression' is no top-level module"),
    ("tests/test_tasks.py", "from bench.tasks import digits", "'bench' is not installed"),
    ("bench/transport.py", "import narrows", "'narrows' is a namespace"),
    ("ps/process/runner.py", "import zmq", "zmq may be imported only in protocols/runtime/sockets.py"),
    ("ps/shard.py", "import zmq", "zmq may be imported only in protocols/runtime/sockets.py"),
    (
        "worker/io.py",
        "from zmq.error import Again",
        "zmq may be imported only in protocols/runtime/sockets.py",
    ),
    ("ps/store.py", "import torch.optim", "torch may be imported only in ps/optimizers.py, worker/"),
    ("compression/spec.py", "import torch", "torch may be imported only in ps/optimizers.py, worker/"),
    ("worker/checkpoint.py", "import pickle", "pickle may be imported only in ps/process/pickling.py"),
    ("protocols/clock.py", "import time", "protocols is pure and must not import time"),
    ("protocols/clock.py", "def f():\n    from os.path import join", "protocols is pure and must not import os"),
    ("protocols/gossip/topology.py", "import math, random", "protocols is pure and must not import random"),
    ("protocols/member/member.py", "from narrows.protocols.runtime import flags", "protocols.runtime is impure"),
    ("ps/shard.py", "import narrows.protocols.runtime.sockets", "protocols.runtime is impure"),
    ("worker/engine.py", "from narrows.protocols.runtime.flags import run", "protocols.runtime is impure"),
]


@pytest.mark.parametrize(("path", "source", "why"), FORBIDDEN)
def test_each_rule_can_fail(path: str, source: str, why: str) -> None:
    (found,) = complaints(path, source)
    assert why in found


ALLOWED = [
    ("protocols/wire.py", "import struct\nimport msgpack\nfrom narrows.protocols.errors import ProtocolError"),
    ("protocols/wire.py", "from . import errors\nfrom .errors import ProtocolError"),
    ("compression/kernels/cpu.py", "import numba\nfrom ..buffers import FloatArray"),
    (
        "ps/process/runner.py",
        "import time\nfrom narrows import protocols\nfrom narrows.compression import parse",
    ),
    ("ps/optimizers.py", "import torch"),
    ("protocols/runtime/flags.py", "import os, socket\nfrom narrows.protocols.modes import MODES"),
    ("worker/command/cli.py", "from narrows.protocols.runtime.flags import run"),
    ("protocols/runtime/sockets.py", "import socket\nimport zmq\nimport zmq.utils.garbage"),
    ("worker/runner.py", "import torch, threading\nfrom narrows.protocols.runtime.sockets import Sockets"),
    ("bench/transport.py", "import torch, zmq, narrows.ps.command.cli\nfrom narrows.worker import rank"),
    ("tests/test_spec.py", "import random\nimport reference\nfrom narrows.compression import parse"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert complaints(path, source) == []


def test_every_package_folder_is_in_the_map_and_the_reverse() -> None:
    folders = {file.parent.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    bare = sorted(folder.as_posix() for folder in folders if not (ROOT / folder / "__init__.py").is_file())
    assert not bare, f"modules in folders without an __init__.py: {bare}"
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert setuptools["package-dir"] == {f"narrows.{package}": package for package in PACKAGES}
    assert sorted(setuptools["packages"]) == sorted(".".join(("narrows", *folder.parts)) for folder in folders)


def test_narrows_is_a_namespace_of_typed_packages() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []


LINES_MAX, FIELDS_MAX, METHODS_MAX = 600, 20, 25


def over_the_limits(path: str, source: str) -> Iterator[str]:
    """The file, where it is too long, and its classes that have too many fields or methods."""
    if source.count("\n") > LINES_MAX:
        yield path
    for node in ast.walk(ast.parse(source, path)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        fields = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        fields |= {
            each.attr
            for method in methods
            if method.name == "__init__"
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name)
            if each.value.id == "self"
        }
        if len(fields) > FIELDS_MAX or len(methods) > METHODS_MAX:
            yield node.name


def test_what_exceeds_the_limits_is_named_in_the_architecture() -> None:
    section = (ROOT / "docs/architecture.md").read_text().partition("## Over the limits\n")[2].partition("\n## ")[0]
    found = {
        name
        for package in ("ps", "worker", "protocols")
        for file in (ROOT / package).rglob("*.py")
        for name in over_the_limits(str(file.relative_to(ROOT)), file.read_text())
    }
    named = {name for name in re.findall(r"`([\w/.]+)`", section) if name.endswith(".py") or name[0].isupper()}
    assert found == named


def test_limits_are_found() -> None:
    many = "".join(f"    def f{number}(self): ...\n" for number in range(METHODS_MAX + 1))
    fields = "".join(f"        self.f{number} = 0\n" for number in range(FIELDS_MAX + 1))
    source = (
        f"class Long:\n{many}\nclass Wide:\n    def __init__(self):\n{fields}\nclass Small:\n    x: int\n"
        + LINES_MAX * "\n"
    )
    assert [*over_the_limits("ps/long.py", source)] == ["ps/long.py", "Long", "Wide"]


def test_the_oldest_torch_loads_files_without_running_code_of_them() -> None:
    """CVE-2025-32434: torch.load(weights_only=True) could be got round before 2.6."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = [each.removeprefix("torch>=") for each in project["dependencies"] if each.startswith("torch>=")]
    assert tuple(map(int, floor.split("."))) >= (2, 6)


def doubled(sources: dict[str, str]) -> dict[str, list[str]]:
    """The class names that more than one place defines, each with its files."""
    found: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source, path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_class_name_stands_for_one_class() -> None:
    files = {file.relative_to(ROOT).as_posix(): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert not doubled({path: file.read_text("utf-8") for path, file in files.items()})


def test_a_doubled_class_name_is_found() -> None:
    two = {"ps/a.py": "class Row: ...\nclass Table: ...", "worker/b.py": "def f():\n    class Row: ..."}
    assert doubled(two) == {"Row": ["ps/a.py", "worker/b.py"]}
