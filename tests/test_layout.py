"""The house rules: arrows between the packages, who may import what, and the map that installs them."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_collection")

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
    "zmq": (
        "protocols/runtime/network/sockets.py",
        "protocols/runtime/network/curve_auth.py",
        "protocols/runtime/network/encryption_cost.py",
    ),
    "torch": ("protocols/layerwise.py", "ps/store/torch_optimizer.py", "worker/"),
    "pickle": ("ps/journal/machine_pickling.py",),  # narrowed to classes of ours: a standby reads what its server sends
    "cloudpickle": (),
    "ray": ("worker/integrations/ray.py", "worker/integrations/ray_actor.py"),
    "marshal": (),
    "shelve": (),
}

RUNTIME = "protocols/runtime/"  # sockets, children, flags: what runs machines, and is none
RUNNERS = (
    *("ps/journal/", "ps/process/", "ps/checkpoints/", "ps/probe/", "ps/command/", "ps/relay/"),
    *("ps/dashboard/run_watch.py", "ps/dashboard/web.py"),  # the process of ps-serve: its record and its pages
    "ps/dashboard/record_reader.py",  # records, here or in a store
    *("worker/session.py", "worker/runtime/", "worker/command/", "worker/integrations/", "worker/pipelining/"),
    "worker/distillation/",
    *("worker/group/group_link.py", "worker/checkpoint/", "worker/data/loader_states.py"),  # files of a worker
)
# Machines: no I/O, and time is an argument. In the first alone the runtime is an exception.
PURE = (
    "protocols/",
    *("ps/server/", "ps/shard/", "ps/store/", "ps/filters/", "ps/coordinator/", "ps/parent/", "ps/replication/"),
    "ps/planner/",
)
NOT_PURE = ("protocols/layerwise.py", "ps/store/torch_optimizer.py")  # they step optimizers of torch

# Modules that a deterministic machine cannot use: sockets, threads, clocks, files, processes, randomness, logs.
IMPURE = {
    *("socket", "socketserver", "select", "selectors", "ssl", "http", "urllib", "zmq"),
    *("threading", "_thread", "asyncio", "concurrent", "queue", "sched", "signal", "multiprocessing", "subprocess"),
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "fileinput", "mmap", "sqlite3", "logging"),
    *("torch", "numba"),
}


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file. A file is parsed and walked once for all tests."""
    return tuple(ast.walk(ast.parse(source)))


def imported_names(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in `source`, wherever it stands; relative ones are made absolute.

    `from a.b import c` yields a.b.c: c may be a module, and where it is none the name says so much more.
    """
    folders = path.split("/")[:-1]
    package = ["narrows", *folders] if folders[0] in PACKAGES else folders
    for node in nodes_of(source):
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
    if path.startswith(PURE) and path not in NOT_PURE and top in IMPURE:
        folder = next(folder for folder in PURE if path.startswith(folder))
        return f"{folder.rstrip('/')} is pure and must not import {top}"
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


CUDA_COMPILER = re.compile(r"numba\.cuda|\bllvmlite\b.*cuda|nvjitlink")


def test_one_file_of_the_product_names_the_compiler_of_cuda_kernels() -> None:
    """And one of tests/kit, which looks into Numba's simulator."""
    found = {
        file.relative_to(ROOT).as_posix()
        for file in sources()
        if not file.is_relative_to(ROOT / "bench")
        and file.name != "test_layout.py"
        and any(CUDA_COMPILER.search(line) for line in _code_of(file.read_text("utf-8")))
    }
    assert found == {"compression/cuda/jit.py", "tests/kit/cuda_simulator.py"}


def _code_of(source: str) -> list[str]:
    """Return the texts and names by which a file may import: strings that are no docstring, and import lines."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
    ]
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [*(text for text in strings if re.fullmatch(r"[\w.]+", text)), *imports]


FORBIDDEN = [
    ("ps/shard/shard.py", "from narrows.worker import rank", "ps must not import worker"),
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
    ("ps/shard/shard.py", "from protocols.wire import encode", "'protocols' is no top-level module"),
    ("tests/test_spec.py", "import compression", "'compression' is no top-level module"),
    ("tests/test_tasks.py", "from bench.tasks import digits", "'bench' is not installed"),
    ("bench/speed/transport.py", "import narrows", "'narrows' is a namespace"),
    ("ps/process/runner.py", "import zmq", "zmq may be imported only in protocols/runtime/network/sockets.py"),
    ("ps/shard/shard.py", "import zmq", "zmq may be imported only in protocols/runtime/network/sockets.py"),
    (
        "worker/io.py",
        "from zmq.error import Again",
        "zmq may be imported only in protocols/runtime/network/sockets.py",
    ),
    (
        "ps/store/store.py",
        "import torch.optim",
        "torch may be imported only in protocols/layerwise.py, ps/store/torch_optimizer.py, worker/",
    ),
    (
        "compression/spec.py",
        "import torch",
        "torch may be imported only in protocols/layerwise.py, ps/store/torch_optimizer.py, worker/",
    ),
    ("worker/checkpoint.py", "import pickle", "pickle may be imported only in ps/journal/machine_pickling.py"),
    ("protocols/clock.py", "import time", "protocols is pure and must not import time"),
    ("protocols/clock.py", "def f():\n    from os.path import join", "protocols is pure and must not import os"),
    ("protocols/config/topology.py", "import math, random", "protocols is pure and must not import random"),
    ("protocols/member/member.py", "from narrows.protocols.runtime import flags", "protocols.runtime is impure"),
    ("ps/shard/shard.py", "import narrows.protocols.runtime.network.sockets", "protocols.runtime is impure"),
    ("worker/sync/engine.py", "from narrows.protocols.runtime.cli.flags import run", "protocols.runtime is impure"),
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
    ("ps/store/torch_optimizer.py", "import torch"),
    ("protocols/runtime/cli/flags.py", "import os, socket\nfrom narrows.protocols.config.modes import MODES"),
    ("worker/command/cli.py", "from narrows.protocols.runtime.cli.flags import run"),
    ("protocols/runtime/network/sockets.py", "import socket\nimport zmq\nimport zmq.utils.garbage"),
    (
        "worker/runtime/member_link.py",
        "import torch, threading\nfrom narrows.protocols.runtime.network.sockets import Sockets",
    ),
    ("bench/speed/transport.py", "import torch, zmq, narrows.ps.command.cli\nfrom narrows.worker import rank"),
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


def test_each_file_beside_the_code_is_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    lacking = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*")):
        if file.is_dir() or file.suffix == ".py" or "__pycache__" in file.parts:
            continue
        folder = next(parent for parent in file.parents if (parent / "__init__.py").is_file())
        package = ".".join(("narrows", *folder.relative_to(ROOT).parts))
        if not any(file.match(f"{folder}/{each}") for each in (*patterns["*"], *patterns.get(package, ()))):
            lacking.append(file.relative_to(ROOT).as_posix())
    assert not lacking, f"files that pyproject.toml does not install: {lacking}"


def test_narrows_is_a_namespace_of_typed_packages() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []


FACE = ("worker/__init__.py", "worker/ray.py", "worker/lightning.py", "worker/transformers.py")  # what scripts import

BOTTOM = "protocols/errors.py"  # it imports nothing of ours, so any file may import it


@cache
def product() -> dict[str, str]:
    """The path and the text of each file of the product."""
    paths = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def imported_files(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each file but those of FACE, the files that it imports, also for types alone and within functions."""
    files = {
        "narrows." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in sources
    }
    found: dict[str, set[str]] = {path: set() for path in sources if path not in FACE}
    for path in found:
        for _, name in imported_names(path, sources[path]):
            if (to := files.get(name) or files.get(name.rpartition(".")[0])) not in (None, BOTTOM):
                found[path].add(str(to))
    return found


def mutual(sources: dict[str, str]) -> set[tuple[str, str]]:
    """The pairs of folders that import each other."""
    imports = imported_files(sources)
    arrows = {(path.rpartition("/")[0], to.rpartition("/")[0]) for path in imports for to in imports[path]}
    return {(a, b) for a, b in arrows if a < b and (b, a) in arrows}


def circles(sources: dict[str, str]) -> list[set[str]]:
    """The sets of files of which each imports all others of its set, by way of others or not. No `__init__` is among them."""
    imports = {path: found for path, found in imported_files(sources).items() if not path.endswith("__init__.py")}
    reached: dict[str, set[str]] = {}
    for path in imports:
        seen, todo = set[str](), [*imports[path]]
        while todo:
            if (to := todo.pop()) in imports and to not in seen:
                seen.add(to)
                todo += imports[to]
        reached[path] = seen
    rings = {frozenset(to for to in seen if path in reached[to]) for path, seen in reached.items() if path in seen}
    return sorted(map(set, rings), key=min)


def test_imports_between_folders_go_one_way() -> None:
    assert not mutual({path: text for path, text in product().items() if not path.startswith("compression/")})


def test_imports_between_files_go_one_way() -> None:
    assert not circles(product())


def test_the_errors_import_nothing_of_ours() -> None:
    names = [name for _, name in imported_names(BOTTOM, (ROOT / BOTTOM).read_text("utf-8"))]
    assert not [name for name in names if name.startswith("narrows")]


def test_folders_that_import_each_other_are_found() -> None:
    sources = {
        BOTTOM: "",
        "protocols/wire.py": "from narrows.protocols.m.x import X",
        "protocols/m/x.py": "from narrows.protocols.errors import NarrowsError",
        "ps/a/x.py": "from narrows.ps.b.y import Y",
        "ps/b/y.py": "def f():\n    from narrows.ps.a import x",
        "ps/b/z.py": "from narrows.ps.c.w import W\nfrom narrows.ps.b import y",
        "ps/c/w.py": "import numpy",
    }
    assert mutual(sources) == {("ps/a", "ps/b")}


def test_files_that_import_each_other_are_found() -> None:
    sources = {
        "ps/a.py": "if TYPE_CHECKING:\n    from narrows.ps.b import B",
        "ps/b.py": "def f():\n    import narrows.ps.c",
        "ps/c.py": "from narrows.ps import a, d",
        "ps/d.py": "import numpy",
        "ps/e.py": "from narrows.ps import a, f",
        "ps/f.py": "from narrows.ps.e import E",
        "ps/__init__.py": "from narrows.ps.d import D",
        "worker/__init__.py": "from narrows.worker.session import S",
        "worker/session.py": "import narrows.worker",
    }
    assert circles(sources) == [{"ps/a.py", "ps/b.py", "ps/c.py"}, {"ps/e.py", "ps/f.py"}]


FILES_MAX = 14


def test_a_folder_has_few_files() -> None:
    crowded = {
        folder.relative_to(ROOT).as_posix(): count
        for package in PACKAGES
        if package != "compression"  # three axes, a file each
        for folder in {file.parent for file in (ROOT / package).rglob("*.py")}
        if (count := len([file for file in folder.glob("*.py") if file.name != "__init__.py"])) > FILES_MAX
    }
    assert not crowded


LINES_MAX, FIELDS_MAX, METHODS_MAX = 600, 20, 25


def over_the_limits(path: str, source: str) -> Iterator[str]:
    """The file, where it is too long, and its classes that have too many fields or methods."""
    if source.count("\n") > LINES_MAX:
        yield path
    for node in nodes_of(source):
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
        for path, source in product().items()
        if not path.startswith("compression/")
        for name in over_the_limits(path, source)
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
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_class_name_stands_for_one_class() -> None:
    assert not doubled(product())


def test_a_doubled_class_name_is_found() -> None:
    two = {"ps/a.py": "class Row: ...\nclass Table: ...", "worker/b.py": "def f():\n    class Row: ..."}
    assert doubled(two) == {"Row": ["ps/a.py", "worker/b.py"]}


def receive_loops(source: str) -> int:
    """The number of `for ... in X.receive(...)`, also where `receive` is a name."""
    loops = [node for node in nodes_of(source) if isinstance(node, ast.For | ast.comprehension)]
    called = [node.iter.func for node in loops if isinstance(node.iter, ast.Call)]
    names = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called]
    return names.count("receive")


def test_one_loop_receives_messages() -> None:
    found = {path: receive_loops(source) for path, source in product().items()}
    assert {path: count for path, count in found.items() if count} == {"protocols/runtime/network/loop.py": 1}


def test_a_receive_loop_is_found() -> None:
    source = "receive = port.receive\nfor a in receive(1): ...\nb = [c for c in self.port.receive(1)]\nport.receive(1)"
    assert receive_loops(source) == 2


def called(node: ast.Call) -> str:
    """The name of a function or method that is called, with its class where that is a plain name."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value.id + "." if isinstance(node.func.value, ast.Name) else ""
        return owner + node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def named_specs(node: ast.AST) -> bool:
    """True if the text "dense" or "auto" is in an expression."""
    return any(isinstance(each, ast.Constant) and each.value in ("dense", "auto") for each in ast.walk(node))


def spec_readers(source: str) -> tuple[set[str], set[str]]:
    """The functions that interpret a SPEC text themselves, and those that have compression make a ladder of it.

    To interpret is to compare with "dense" or "auto", to ask whether a text starts so, or to call compression.parse
    for a text that is no literal.
    """
    ours = {
        alias.asname or alias.name
        for node in nodes_of(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("narrows.compression")
        for alias in node.names
    }
    interpret, resolve = set[str](), set[str]()
    for function in nodes_of(source):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and named_specs(node):
                interpret.add(function.name)
            if not isinstance(node, ast.Call):
                continue
            name = called(node)
            literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if (name.endswith("startswith") and named_specs(node)) or (
                name == "parse" and name in ours and not literal
            ):
                interpret.add(function.name)
            if name in ("ladder", "Codecs.of") and name.partition(".")[0] in ours and not literal:
                resolve.add(function.name)
    return interpret, resolve


SPECS_INTERPRETED = {
    "protocols/config/settings.py": {"validated"},  # flags that exclude each other; protocols imports no compression
    "worker/runtime/device.py": {"device"},  # `auto` of NARROWS_DEVICE is no SPEC
}
SPECS_RESOLVED = {
    # a run: its server, a server's child that is a cluster, and a worker
    "ps/shard/model_shard.py": {"__init__"},
    "ps/parent/parent_link.py": {"codecs"},
    "worker/sync/tuning.py": {"change"},
    # before a run: its flags are checked, its costs predicted
    "ps/command/serve.py": {"checked"},
    "ps/process/machine_factory.py": {"machine"},
    "ps/planner/codec_costs.py": {"coded"},
    "ps/planner/modes_and_specs.py": {"inside"},
    "ps/planner/host_memory.py": {"_resolved"},
    "worker/check/findings.py": {"specs", "_memory"},
    "worker/check/script_watch.py": {"_encoded"},
}


def test_a_spec_is_resolved_once_and_then_asked_as_an_object() -> None:
    sources = {path: text for path, text in product().items() if not path.startswith("compression/")}
    found = {path: spec_readers(text) for path, text in sources.items()}
    assert {path: interpret for path, (interpret, _) in found.items() if interpret} == SPECS_INTERPRETED
    assert {path: resolve for path, (_, resolve) in found.items() if resolve} == SPECS_RESOLVED
    assert len(set().union(*SPECS_INTERPRETED.values())) <= 3


def test_a_reader_of_a_spec_is_found() -> None:
    source = """
from narrows.compression import Codecs, ladder, parse

def a(x): return x.spec != "dense"
def b(x): return x.startswith("auto")
def c(x): return parse(x).lossless
def d(x): return x in ("", "dense")
def e(x): return ladder(x).raw
def f(x): return Codecs.of(x.up, x.down)
def g(): return parse("dense"), ladder("dense"), json.parse(x), {"compress": "dense"}
"""
    assert spec_readers(source) == ({"a", "b", "c", "d"}, {"e", "f"})


# Attributes of objects of Python, NumPy, Numba, torch and trainers, which have no verb for what is assigned here.
FOREIGN_ATTRIBUTES = {
    *("atexit", "writeable", "_cache", "__loader__", "grad", "data", "__class__", "param_groups", "_opt_called"),
    *("tempdir", "argv", "orig_argv", "excepthook", "backward", "__iter__"),
    *("global_step", "best_model_checkpoint", "_initial_global_step", "_globalstep_last_logged", "base_dataloader"),
    *("optimizers", "save_checkpoint", "remove_checkpoint", "lightning_module_state_dict", "_batches_that_stepped"),
}
ASSIGNED_ELSEWHERE: dict[str, set[str]] = {  # path: attributes, each with the reason
    "worker/optimizer.py": {"state"},  # of a torch optimizer
}


def is_class(node: ast.expr | None) -> bool:
    """True for a call of a class: the object is new, and belongs to the caller."""
    return isinstance(node, ast.Call) and (called(node).rpartition(".")[2][:1].isupper() or called(node) == "cls")


def record_fields(source: str) -> set[str]:
    """The annotated fields of the classes that a file defines."""
    return {
        each.target.id
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns to, also within a tuple."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(each, ast.Attribute):
                yield each


def outside_assignments(source: str) -> set[str]:
    """Attributes of objects of other files that a file assigns to.

    An object of another file is neither `self` nor made by the same function, and no class of this file has such a
    field.
    """
    fields, found = record_fields(source), set[str]()
    for function in nodes_of(source):
        if not isinstance(function, ast.FunctionDef):
            continue
        statements = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)]
        made = {
            target.id
            for node in statements
            if is_class(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for attribute in (each for node in ast.walk(function) for each in assigned(node)):
            owner = attribute.value.id if isinstance(attribute.value, ast.Name) else ""
            if owner not in {"self", "cls", *made} and attribute.attr not in fields | FOREIGN_ATTRIBUTES:
                found.add(attribute.attr)
    return found


def test_no_file_assigns_to_fields_of_objects_of_another() -> None:
    found = {path: outside_assignments(text) for path, text in product().items()}
    assert {path: names for path, names in found.items() if names} == ASSIGNED_ELSEWHERE
    assert sum(map(len, ASSIGNED_ELSEWHERE.values())) <= 5


def test_an_assignment_to_a_field_of_another_object_is_found() -> None:
    source = """
class Row:
    count: int

class Table:
    def put(self, row, other):
        self.newest, row.count, other.clock = row, 1, 2
        made = Table()
        made.name = ""
        self.inner.deep += 1
        each = other.find()
        each.late: int = 3
"""
    assert outside_assignments(source) == {"clock", "deep", "late"}


# Words of file names that docs/glossary.md need not define: Python's, those of other programs, and plain English.
PLAIN_WORDS = {
    *(
        "init",
        "main",
        "cli",
        "jit",
        "cpu",
        "module",
        "function",
        "process",
        "interpreter",
        "pickling",
        "queue",
    ),
    *("factory", "client", "reader", "writer", "loader", "logger", "signals", "pipe", "tcp", "web", "disk", "random"),
    *("kubernetes", "lightning", "prometheus", "ray", "torch", "transformers", "serve", "top", "plot", "screen"),
    *(
        "check",
        "choose",
        "edit",
        "load",
        "measured",
        "select",
        "staged",
        "clustered",
        "wait",
        "watch",
        "grouped",
    ),
    *("and", "not", "finite", "whole", "awake", "time", "names", "file", "texts", "stats", "sums", "scans"),
    *("flags", "options", "variables", "output", "formats", "commands", "entry", "policy", "lifecycle", "forwarding"),
    *("landing", "cycles", "subsets", "scratch", "weight", "base"),
}


def vocabulary(page: str) -> set[str]:
    """The words that a page defines: those in bold."""
    return {word.lower() for bold in re.findall(r"\*\*([^*]+)\*\*", page) for word in re.findall(r"[A-Za-z]+", bold)}


def known(word: str, words: set[str]) -> bool:
    """True if `words` has the word, in the singular or the plural."""
    return not words.isdisjoint(
        (word, f"{word}s", word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word))
    )


def unknown_words(paths: Iterable[str], words: set[str]) -> list[str]:
    """(path, word) as text, for each word of a file name that `words` lacks."""
    return [
        f"{path}: {word}"
        for path in paths
        for word in path.rpartition("/")[2].removesuffix(".py").split("_")
        if word and not known(word, words)
    ]


def test_each_word_of_a_file_name_is_in_the_vocabulary() -> None:
    words = vocabulary((ROOT / "docs/glossary.md").read_text("utf-8"))
    assert len(words) > 150
    paths = [file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = unknown_words(paths, words | PLAIN_WORDS)
    assert not found, f"define these words in bold in docs/glossary.md, or take the field's word: {found}"
    used = {word for path in paths for word in path.rpartition("/")[2].removesuffix(".py").split("_")}
    left_over = [word for word in PLAIN_WORDS if not known(word, used)]
    assert not left_over, f"no file name has these words any more; take them out of PLAIN_WORDS: {left_over}"
    doubled = PLAIN_WORDS & words
    assert not doubled, f"docs/glossary.md defines these words; take them out of PLAIN_WORDS: {doubled}"


def test_a_made_up_file_name_is_found() -> None:
    words = vocabulary("- **heartbeat**: a message.\n- **key range**, **payload**: bytes; *lease*, `quorum`")
    assert words == {"heartbeat", "key", "range", "payload"}
    assert unknown_words(["ps/a/heartbeats.py", "ps/__init__.py", "worker/key_ranges.py"], words | {"init"}) == []
    assert unknown_words(["ps/lives.py", "worker/heartbeat_quorum.py"], words) == [
        "ps/lives.py: lives",
        "worker/heartbeat_quorum.py: quorum",
    ]


# Words that an engineer would search for, and the file that each leads to. They are from papers on parameter servers
# (ps-lite), from torch, Ray and raft.
SEARCHED = {
    # what has gone wrong
    "heartbeat": "protocols/member/heartbeat_summary.py",
    "retry": "protocols/config/retry.py",
    "lease": "ps/coordinator/sample_leases.py",
    "liveness": "worker/group/group_liveness.py",
    "watchdog": "ps/process/watchdog.py",
    "supervisor": "ps/command/shard_supervisor.py",
    "restart": "ps/command/restart_policy.py",
    "failover": "protocols/member/failover_view.py",
    "replication": "ps/replication/replication_primary.py",
    "standby": "ps/replication/standby.py",
    "journal": "ps/journal/journal.py",
    "checkpoint": "ps/coordinator/checkpoint_schedule.py",
    "archive": "ps/checkpoints/remote_archive.py",
    "signal": "protocols/runtime/processes/signals.py",
    # who is in a run
    "coordinator": "ps/coordinator/coordinator.py",
    "membership": "ps/server/parent_membership.py",
    "member": "ps/coordinator/members.py",
    "session": "protocols/member/session.py",
    "bootstrap": "ps/process/bootstrap_server.py",
    "reshard": "ps/coordinator/resharding.py",
    "launcher": "worker/command/launcher.py",
    "actor": "worker/integrations/ray_actor.py",
    "config": "protocols/config/settings.py",
    # the path of a push
    "push": "ps/shard/push_assembler.py",
    "publication": "ps/shard/publications.py",
    "barrier": "ps/shard/barrier.py",
    "clock": "ps/coordinator/clocks.py",
    "gossip": "protocols/gossip/driver.py",
    "topology": "protocols/config/topology.py",
    "momentum": "protocols/gossip/outer_momentum.py",
    "overlap": "worker/sync/overlap.py",
    "outlier": "ps/filters/outlier_stats.py",
    "clip": "ps/filters/norm_clip.py",
    "privacy": "worker/model/privacy.py",
    "auth": "protocols/runtime/network/curve_auth.py",
    "encryption": "protocols/runtime/network/encryption_cost.py",
    "socket": "protocols/runtime/network/sockets.py",
    "codec": "compression/codecs.py",
    "feedback": "compression/feedback.py",
    "sparsifier": "compression/sparsifiers.py",
    # the model
    "optimizer": "ps/store/torch_optimizer.py",
    "gradient": "worker/sync/gradients.py",
    "embedding": "worker/model/embedding.py",
    "fsdp": "worker/model/fsdp_slices.py",
    "buffer": "worker/model/module_buffers.py",
    "dataset": "worker/data/datasets.py",
    "pipeline": "protocols/pipeline_channels.py",
    # what is seen of a run
    "metrics": "protocols/member/metrics.py",
    "dashboard": "ps/dashboard/web.py",
    "probe": "ps/probe/director.py",
    "simulator": "tests/simulation/simulator.py",
}


def test_a_word_that_one_searches_for_leads_to_a_file() -> None:
    gone = [path for path in SEARCHED.values() if not (ROOT / path).is_file()]
    assert not gone, f"SEARCHED has files that are not there: {gone}"
    nowhere = [word for word, path in SEARCHED.items() if word not in path]
    assert not nowhere, f"these words are not in the names of their files: {nowhere}"
