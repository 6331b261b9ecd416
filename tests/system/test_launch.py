"""A forked child is what `python WORDS` is: the same script says the same, ends the same and finds the same around it.

`plain` is what the interpreter does; `Starter` forks from a forker that has imported next to nothing, so a child takes
milliseconds. The imports of ps-worker and ps-serve are tried at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.processes import (
    GONE_S,
    LIMIT_S,
    ROOT,
    SCRIPT,
    alive,
    environment,
    finished,
    sentences,
    serving,
    until,
)
from numba.core.caching import UserProvidedCacheLocator

from narrows.compression import warm_up
from narrows.protocols.runtime.processes.children import FORKER, STARTED_BY, ChildProcesses, StartedChild

Said = tuple[int, str, str]  # exit code, stdout, stderr
ENV = environment()


@pytest.fixture(autouse=True)
def _as_a_shell_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands here are interpreters of their own."""
    monkeypatch.setattr("kit.processes.FORKED", {})


class Starter:
    """Children of one forker, and what they said."""

    def __init__(self, needs: Sequence[tuple[str, str]] = (), **env: str) -> None:
        self.children = ChildProcesses()
        self.children.prepare(ENV | env, needs)
        self.told: list[tuple[str, str]] = []  # of the forker
        while not self.told or self.told[-1][0] != "ready":
            index, kind, value = self.next()
            assert index == FORKER
            self.hear(kind, value)

    def hear(self, kind: str, value: Any) -> None:
        self.told.append((kind, value["why" if kind == "ready" else "text"] if isinstance(value, dict) else value))

    def next(self) -> tuple[int, str, Any]:
        event = self.children.next(LIMIT_S)
        assert event is not None
        return event

    def start(self, *words: str, **env: str) -> StartedChild:
        return self.children.start(0, words, ENV | env, listens={1: "out", 2: "err"}, name="named by us")

    def said(self) -> Said:
        """All that the child says that was started last, to its end."""
        lines: dict[str, list[str]] = {"out": [], "err": []}
        while (event := self.next())[1] != "exit":
            if event[0] == FORKER:
                self.hear(*event[1:])
            else:
                lines[event[1]].append(event[2])
        return int(event[2]), "\n".join(lines["out"]), "\n".join(lines["err"])

    def run(self, *words: str, **env: str) -> Said:
        self.start(*words, **env)
        return self.said()


@contextmanager
def forker(needs: Sequence[tuple[str, str]] = (), **env: str) -> Iterator[Starter]:
    starter = Starter(needs, **env)
    try:
        yield starter
    finally:
        starter.children.close()


@pytest.fixture(scope="module")
def forks() -> Iterator[Starter]:
    with forker([("importing numpy", "numpy.random")]) as starter:
        assert starter.told == [("say", "importing numpy"), ("ready", "")]
        yield starter
        assert starter.told[-1] == ("ready", ""), "all of them were forked"


def plain(*words: str, limit_s: Any = LIMIT_S, **env: str) -> Said:
    done = subprocess.run(
        [sys.executable, *words],
        env=ENV | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return done.returncode, done.stdout.rstrip("\n"), done.stderr.rstrip("\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which we are, and the forker is not."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forked(forks: Starter) -> bool:
    """Whether the last child was a child of the forker, and stayed what it was."""
    return forks.children.forks


# How it ends.

KEPT = "class Kept:\n    def __init__(self, name): self.name = name\n    def __del__(self): print('destroyed', self.name)\n"
ENDS = {
    "well": "print('done')",
    "by an error": "def f():\n    raise ValueError('boom')\nprint('begins')\nf()",
    "by an error within an error": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "by a group of errors": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "by an error of its own class": "class Mine(Exception):\n    pass\nraise Mine('here')",
    "by no Python": "print('never'\n",
    "by bad bytes": "# \udcff\nprint(1)",
    "with a code": "import sys\nsys.exit(7)",
    "with a sentence": "import sys\nsys.exit('that was it')",
    "with nothing": "raise SystemExit",
    "at once": "import os\nprint('out', flush=True)\nos._exit(3)",
    "by an interrupt": "raise KeyboardInterrupt",
    "by its own signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(60)",
    "by a crash": "import ctypes\nctypes.string_at(0)",
    "with handlers": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\nprint('script')",
    "with handlers after an error": "import atexit, sys\natexit.register(lambda: print('at exit', sys.last_value))\n1 / 0",
    "with a handler that fails": "import atexit\natexit.register(divmod, 1, 0)\nprint('script')",
    "after its threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "with a thread that fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
    "without flushing": "import sys\nsys.stdout = open(1, 'w', buffering=9999, closefd=False)\nprint('late')",
    "with an own hook": "import sys\nsys.excepthook = lambda *error: print('hook', error[0], error[2].tb_lineno)\n1 / 0",
    "with a hook that fails": "import sys\ndef hook(*error): raise ValueError('in the hook')\nsys.excepthook = hook\n1 / 0",
    "with a warning": "import warnings\nwarnings.warn('beware')",
    "with a closed stdout": "import sys\nsys.stdout.close()\n",
    "with a file that nobody closes": "import os\nfile = open(os.dup(1), 'w')\nprint('kept', file=file)\nprint('first')",
    "with a file in a cycle": "import os\nfile = [open(os.dup(1), 'w')]\nfile.append(file)\nfile[0].write('kept\\n')",
    "with a file that a shared module holds": "import json, os\njson.file = open(os.dup(1), 'w')\njson.file.write('kept\\n')",
    "with output of C": "import ctypes\nctypes.CDLL(None).puts(b'by C')\nprint('first', flush=True)",
    "with objects": KEPT + "_b, a, c = Kept('first'), Kept('second'), Kept('third')\nraise SystemExit(3)",
    "with objects in a cycle": KEPT + "a, b = Kept('in a'), Kept('in b')\na.b, b.a = b, a\ndel a, b",
    "with an object that refers to the script": KEPT + "import os\nclass Sees(Kept):\n"
    "    def __del__(self): print(os and os.getpid() > 0, type(Kept))\nsees = Sees('it')",
    "with an object that fails": "import sys\nclass Fails:\n    def __del__(self): 1 / 0\n"
    "sys.unraisablehook = lambda each: print('unraisable', each.exc_type)\nfails = Fails()",
    "with objects of its modules": "import sys, types\nown = types.ModuleType('own')\nsys.modules['own'] = own\n"
    "exec('class Kept:\\n    def __del__(self): print(\"own\")\\nkept = Kept()', own.__dict__)\ndel own",
    "with a finalizer": "import weakref\nclass Mine: pass\nmine = Mine()\nweakref.finalize(mine, print, 'finalized')",
    "beside a thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + KEPT
    + "kept = Kept('well')",
    "beside a thread of ours": KEPT + "import threading\nkept = Kept('well')\n"
    "threading.Thread(target=threading.Event().wait, name='narrows-x', daemon=True).start()",
    "in a fork": KEPT + "import os, sys\nkept = Kept('each')\nif os.fork() == 0: sys.exit(5)\nprint(os.wait()[1] >> 8)",
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_as_it_does_with_python(how: str, here: Path, forks: Starter) -> None:
    (here / "script.py").write_bytes(ENDS[how].encode(errors="surrogateescape"))
    words = (str(here / "script.py"), "word")
    code, out, err = forks.run(*words)
    if how == "with a hook that fails":  # it is called by ours, which is seen here and nowhere else
        err = re.sub(r'  File "[^"]*/interpreter\.py", line \d+, in hook\n    .*\n(    [~^]+\n)?', "", err)
    assert (code, out, err) == plain(*words)


def test_a_command_of_narrows_ends_as_a_script_does_but_destroys_nothing(here: Path) -> None:
    """Handlers, threads, output and exit code are those of the interpreter."""
    (here / "patch").mkdir()
    (here / "patch" / "ours.py").write_text(
        "from narrows.protocols.runtime.processes import interpreter\ninterpreter.OURS = 'command'"
    )
    ends = "class Kept:\n    def __del__(self): print('destroyed')\nkept = Kept()\nraise SystemExit"
    with forker([("", "ours")], PYTHONPATH=str(here / "patch"), PYTHONUNBUFFERED="") as starter:
        for how, code in (("with handlers", 7), ("after its threads", None), ("well", 300)):
            (here / "command.py").write_text(f"{ENDS[how]}\n{ends}({code})")
            expected = plain("-m", "command")
            got = starter.run("-m", "command")
            assert expected[1].endswith("destroyed") and got[0] == expected[0] and got[2] == expected[2]
            assert got[1] == expected[1].removesuffix("destroyed").rstrip("\n")
        assert starter.children.forks


def test_a_script_destroys_what_is_its_own_and_nothing_that_all_share(here: Path) -> None:
    """Pages that it shares with its fork server are not copied at its end: of torch these are 0.2 GB."""
    (here / "far").mkdir()
    (here / "far" / "shared.py").write_text(
        KEPT + "import weakref\nkept = Kept('shared')\nweakref.finalize(kept, print, 'finalized')"
    )
    (here / "own.py").write_text("from shared import Kept\nkept = Kept('own')")
    (here / "script.py").write_text("import own, shared\nkept = shared.Kept('script')")
    with forker([("", "shared")], PYTHONPATH=str(here / "far")) as starter:
        code, out, err = starter.run(str(here / "script.py"))
        assert (code, err, starter.children.forks) == (0, "", True)
        assert sorted(out.splitlines()) == ["destroyed own", "destroyed script"]


def test_a_script_that_is_interrupted(here: Path, forks: Starter) -> None:
    path = here / "script.py"
    # Waits in turns: Python may not see a signal that comes just before a wait without end.
    path.write_text("import threading\nprint('waits', flush=True)\nfor _ in range(600): threading.Event().wait(0.1)")
    for number, code in ((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)):
        child = forks.start(str(path))
        assert forks.next()[1:] == ("out", "waits")
        child.signal(number)
        got, _, err = forks.said()
        assert got == code
        assert (f'File "{path}", line ' in err) == (number == signal.SIGINT) and "fork_server.py" not in err


# Around it.

FACTS = """
import gc, json, locale, os, pickle, signal, sys, threading
class Mine: pass
kept = {name: value if isinstance(value, (str, type(None), dict)) else type(value).__name__
        for name, value in list(globals().items()) if name not in ("__annotations__",)}
facts = {
    "globals": kept, "main": sys.modules["__main__"].Mine is Mine, "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "executable": sys.executable,
    "spec": __spec__ and (__spec__.name, __spec__.origin), "cwd": os.getcwd(), "umask": os.umask(0o77),
    "environ": {name: value for name, value in os.environ.items() if name != "_"},
    "leads": (os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)),
    "std": [(f.name, f.mode, f.encoding, f.errors, f.isatty(), f.fileno(), f.line_buffering, f.write_through, f.seekable())
            for f in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin": (os.readlink("/proc/self/fd/0"), sys.stdin.read()),
    "fds": sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "inheritable": [fd for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)],
    "signals": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "ignored": [line for line in open("/proc/self/status") if line.startswith(("Sig", "Shd"))],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": (threading.active_count(), threading.current_thread() is threading.main_thread(), os.listdir("/proc/self/task")
                == [str(os.getpid())]),
    "gc": (gc.isenabled(), gc.get_threshold()), "hooks": sys.excepthook is sys.__excepthook__, "locale": locale.setlocale(0),
    "recursion": sys.getrecursionlimit(), "warn": sys.warnoptions,
}
print(json.dumps(facts))
"""


def facts(said: Said, **absent: Any) -> dict[str, Any]:
    code, out, err = said
    assert code == 0 and not err, err
    found: dict[str, Any] = json.loads(out)
    found["environ"].pop(STARTED_BY, None)  # of no use to a script
    found["ignored"] = [line for line in found["ignored"] if not line.startswith("SigQ")]  # how many wait, of the user
    return found


@pytest.mark.parametrize("words", [
    ["{here}/script.py", "a", "-m", "--b"],
    ["script.py"],
    ["./script.py", ""],
    ["../{name}/script.py"],
    ["link.py"],
    ["-m", "script", "a", "-b"],
    ["-m", "package", "a"],
    ["-m", "package.inner"],
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("safe", ["", "1"])
def test_a_script_finds_what_it_finds_with_python(words: list[str], safe: str, here: Path) -> None:
    package = here / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in (here / "script.py", package / "__main__.py", package / "inner.py"):
        path.write_text(FACTS)
    other = here / "other"
    other.mkdir()
    (other / "target.py").write_text(FACTS)
    (here / "link.py").symlink_to(other / "target.py")
    words = [word.format(here=here, name=here.name) for word in words]
    env = {"PYTHONPATH": str(here), "OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"} | (
        {"PYTHONSAFEPATH": safe} if safe else {}
    )
    with forker([], **env) as starter:
        got, expected = facts(starter.run(*words, **env)), facts(fresh(*words, **env))
        assert got == expected
        assert starter.children.forks


def fresh(*words: str, **env: str) -> Said:
    """From the same children without a forker: a new session, and the same pipes."""
    children = Starter.__new__(Starter)
    children.children, children.told = ChildProcesses(), []
    return children.run(*words, **env)


def test_what_it_is_given_is_its_own(here: Path, forks: Starter) -> None:
    """Descriptors by the variable that names them, none of the forker's, its own name, and what it does not share."""
    path = here / "script.py"
    path.write_text(
        "import os, random, uuid, numpy, tempfile\n"
        "os.write(int(os.environ['FD']), b'x')\n"
        "fd = int(os.environ['FD'])\n"
        "print(open('/proc/self/comm').read().strip(), len(os.listdir('/proc/self/fd')), os.get_inheritable(fd))\n"
        "print(random.random(), numpy.random.rand(), uuid.uuid4(), tempfile.mktemp())"
    )
    ours, theirs = os.pipe()
    said = set()
    for _ in range(3):
        forks.children.start(
            0, [str(path)], ENV, listens={1: "out", 2: "err"}, passed={"FD": theirs}, name="a name longer than 15"
        )
        code, out, err = forks.said()
        first, second = out.splitlines()
        assert code == 0 and not err and first == "a name longer t 5 True" and os.read(ours, 9) == b"x"
        said |= set(second.split())
    assert len(said) == 12
    os.close(ours)
    os.close(theirs)


def test_a_script_may_start_processes_of_its_own(here: Path, forks: Starter) -> None:
    """Those that Python spawns import the script by its name."""
    path = here / "script.py"
    path.write_text(
        "import multiprocessing, os, subprocess, sys\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        with multiprocessing.get_context(method).Pool(2) as pool:\n"
        "            print(pool.map(double, [1, 2]))\n"
        "    print(subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, text=True).stdout)\n"
        "    import warnings\n    warnings.simplefilter('ignore')\n"  # Python 3.12 warns of threads, which NumPy has here
        "    if os.fork() == 0:\n        sys.exit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert forks.run(str(path)) == (0, "[2, 4]\n[2, 4]\n[2, 4]\n3\n\n5", "")


# Left to a fresh interpreter.


@pytest.mark.parametrize(("names", "words"), [
    (["script.py", "queue.py"], ["script.py"]),
    (["script.py", "numpy/__init__.py"], ["script.py"]),
    (["script.py", "numpy/__init__.py"], ["-m", "script"]),
    (["script.py", "queue.txt", "random/data.csv"], ["script.py"]),
    (["script.py"], ["-m", "json.tool", "--help"]),
    (["script.py"], ["-c", "import sys; print(sys.argv, sys.orig_argv)", "x"]),
    (["script.py"], ["-X", "utf8", "script.py", "x"]),
    (["script.py"], ["app.zip", "x"]),
    (["script.py"], ["app", "x"]),
    (["script.py"], ["-m", "no_such_module"]),
    (["script.py"], ["-m", "email"]),
], ids=str)  # fmt: skip
def test_what_only_a_fresh_interpreter_does_one_does(
    names: list[str], words: list[str], here: Path, forks: Starter
) -> None:
    script = (
        "import sys, os\nprint(sys.argv, sys.path[0], __file__, __name__)\n"
        "for name in ('queue', 'numpy', 'random'):\n    print(getattr(__import__(name), '__file__', None))\n"
    )
    for name in names:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(script if name == "script.py" else "")
    (here / "app").mkdir()
    (here / "app" / "__main__.py").write_text(script)
    with zipfile.ZipFile(here / "app.zip", "w") as file:
        file.writestr("__main__.py", script)
    with forker([("", "numpy"), ("", "queue")]) as starter:
        assert starter.run(*words) == plain(*words)
        assert starter.children.forks


# Where nothing is forked.


def started_without_fork(starter: Starter, here: Path, why: str) -> None:
    assert starter.told == [("ready", why)] and not starter.children.forks
    (here / "script.py").write_text("print('ran')")
    assert starter.run(str(here / "script.py")) == (0, "ran", "")
    assert len(starter.told) == 1, "it is said once"


@pytest.mark.parametrize(("text", "why"), [
    ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
     "2 threads are alive after the imports"),
    ("from narrows.protocols.runtime.processes import fork_server\nfork_server.DEVICES = ('/dev/zero',)\n"
     "file = open('/dev/zero')",
     "an import has opened /dev/zero"),
    ("import os\ndef refused(pid):\n    raise OSError(38, 'Function not implemented')\nos.pidfd_open = refused",
     "the kernel has no pidfd (Function not implemented)"),
])  # fmt: skip
def test_what_must_not_be_forked_is_not(text: str, why: str, here: Path) -> None:
    (here / "bad.py").write_text(text)
    with forker([("", "bad")], PYTHONPATH=str(here)) as starter:
        started_without_fork(starter, here, why)


def test_a_fork_server_that_cannot_import_says_so(here: Path) -> None:
    children = ChildProcesses()
    children.prepare(ENV, [("importing", "narrows.no_such_module")])
    said: dict[str, list[str]] = {"say": [], "ready": [], "err": []}
    while not (said["ready"] and any("No module named 'narrows.no_such_module'" in line for line in said["err"])):
        event = children.next(LIMIT_S)
        assert event is not None and event[0] == FORKER, said
        said[event[1]] += event[2].values() if isinstance(event[2], dict) else [event[2]]
    children.close()
    assert said["say"] == ["importing"] and said["ready"] == ["the process that forks them has ended"]


def test_threads_that_come_later_are_seen_too(here: Path) -> None:
    (here / "later.py").write_text(
        "import signal, threading\n"
        "begin = threading.Thread(target=threading.Event().wait, daemon=True).start\n"
        "signal.signal(signal.SIGUSR1, lambda *_: begin())"
    )
    (here / "script.py").write_text("print('ran')")
    with forker([("", "later")], PYTHONPATH=str(here)) as starter:
        assert starter.run(str(here / "script.py")) == (0, "ran", "") and starter.told == [("ready", "")]
        assert starter.children.forker is not None
        starter.children.forker.signal(signal.SIGUSR1)
        tasks = Path(f"/proc/{starter.children.forker.pid}/task")
        until(lambda: len(list(tasks.iterdir())) == 2, "its second thread")
        for _ in range(2):
            assert starter.run(str(here / "script.py")) == (0, "ran", "")
        assert starter.told == [("ready", ""), ("ready", "2 threads are alive after the imports")]


@pytest.mark.parametrize("count", [2, 20])
def test_an_environment_may_be_as_long_as_exec_allows(count: int, here: Path) -> None:
    (here / "script.py").write_text("import os, sys; print(len(os.environ['A1']), len(sys.argv[1]))")
    with forker() as starter:
        long = {f"A{i}": "x" * 100_000 for i in range(count)}
        assert starter.run(str(here / "script.py"), "y" * 100_000, **long) == (0, "100000 100000", "")
        assert starter.told == [("ready", "")], "it was forked"


# Who outlives whom.


def replaced(children: ChildProcesses, before: StartedChild) -> bool:
    return children.forker is not before and children.forks


def test_a_fork_server_that_dies_takes_no_child_along_and_another_takes_its_place(here: Path) -> None:
    (here / "script.py").write_text("import sys\nprint('waits', flush=True)\nsys.stdin.readline()\nsys.exit(7)")
    with forker() as starter:
        children = starter.children
        for _ in range(2):
            before = children.forker
            assert before is not None
            child = children.start(
                0, [str(here / "script.py")], ENV, listens={1: "out", 2: "err"}, stdin=True, name="named by us"
            )
            assert starter.next()[1:] == ("out", "waits")
            before.kill()
            until(partial(replaced, children, before), "another forker", LIMIT_S)
            assert alive(child.pid)
            child.write("")
            assert starter.said() == (7, "", ""), "its exit code is known as before"
        assert starter.told == [("ready", "")], "nobody need know"


def test_a_fork_server_that_dies_before_it_is_ready_is_done_without(here: Path) -> None:
    (here / "slow.py").write_text("import time\ntime.sleep(600)")
    (here / "script.py").write_text("print('ran')")
    children = ChildProcesses()
    children.prepare(ENV | {"PYTHONPATH": str(here)}, [("", "slow")])
    assert children.forker is not None
    children.forker.kill()
    event = children.next(LIMIT_S)
    assert event == (FORKER, "ready", {"why": "the process that forks them has ended"})
    children.start(0, [str(here / "script.py")], ENV, listens={1: "out"})
    assert children.next(LIMIT_S) == (0, "out", "ran") and children.next(LIMIT_S) == (0, "exit", 0)
    children.close()


def gone(pid: int) -> bool:
    return not alive(pid)


def test_a_fork_server_ends_with_its_command(here: Path) -> None:
    """Also where the command is killed, in whatever the forker does."""
    (here / "slow.py").write_text("import time\ntime.sleep(0.5)")
    (here / "command.py").write_text(
        "import os, sys, time\nfrom narrows.protocols.runtime.processes.children import ChildProcesses\n"
        "children = ChildProcesses()\n"
        "children.prepare(dict(os.environ), [('', 'slow')])\nprint(children.forker.pid, flush=True)\n"
        "while len(sys.argv) > 1 and not children.forks:\n    time.sleep(0.01)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    for words in ([], ["wait"]):
        command = subprocess.Popen(
            [sys.executable, str(here / "command.py"), *words],
            env=ENV | {"PYTHONPATH": str(here)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        assert command.stdout.readline() == "ready\n" and alive(pid)
        command.kill()
        command.wait()
        command.stdout.close()
        until(partial(gone, pid), "the forker to be gone", GONE_S)


# ps-worker and ps-serve.

ABOUT = """
import ctypes, json, os, random, sys
threads = len(os.listdir("/proc/self/task"))
import numpy, torch
from torch.utils.data import DataLoader, TensorDataset
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "MALLOC_ARENA_MAX", "RANK",
         "NARROWS_LOCAL_RANK", "WORLD_SIZE", "NARROWS_SERVER", "NARROWS_DEVICE", "NARROWS_SETS", "PYTHONUNBUFFERED")
maps = {line.split()[-1] for line in open("/proc/self/maps")}
blas = [library for library in map(ctypes.CDLL, (path for path in maps if "openblas64" in path))]
batches = [len(batch[0]) for batch in DataLoader(TensorDataset(torch.arange(10)), 4, num_workers=2)]
one = torch.ones(500, 500) @ torch.ones(500, 500)
two = numpy.ones((500, 500)) @ numpy.ones((500, 500))
print(json.dumps({
    "environ": {name: os.environ.get(name) for name in names}, "threads": threads, "initialized": torch.cuda.is_initialized(),
    "cuda": [path for path in maps if "libcuda." in path or "/dev/nvidia" in path],
    "torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
    "blas": [library.scipy_openblas_get_num_threads64_() for library in blas], "batches": batches,
    "sum": (float(one.sum()), float(two.sum())), "path": sys.path,
    "random": [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()],
}))
"""


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}], ids=["1", "3"])
def test_a_worker_finds_what_one_in_its_own_interpreter_finds(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(ABOUT)
    words = ("ps-worker", "--server", "tcp://127.0.0.1:1", "-n", "2")
    told: list[dict[str, Any]] = []
    for flags in ([], ["--fresh"]):
        code, out, err = finished(*words, *flags, str(path), env=env)
        assert code == 0 and ("ps-worker: importing torch ..." in err) == (not flags), err
        told += sorted(
            map(json.loads, out.splitlines()), key=lambda worker: str(worker["environ"]["NARROWS_LOCAL_RANK"])
        )
    assert len({value for worker in told for value in worker.pop("random")}) == 16
    threads = [worker.pop("threads") for worker in told]
    assert threads[2:] == [1, 1] and (env or threads[:2] == [1, 1])  # OpenBLAS has made what it was asked for
    assert told[:2] == told[2:]
    assert told[0]["cuda"] == [] and not told[0]["initialized"]


def test_a_command_that_must_not_fork_says_so_once_and_runs(tmp_path: Path) -> None:
    """Both sides: every interpreter here has a second thread."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "pass")
    code, _, err = finished("ps-worker", str(path), "5", env={"PYTHONPATH": str(tmp_path)})
    said = sentences(err)
    why = "2 threads are alive after the imports"
    own = f"ps-worker: each worker starts in an interpreter of its own: {why}"
    assert err.splitlines()[:3] == ["ps-worker: loading kernels ...", own, "ps-worker: starting the server ..."], err
    assert code == 0 and said.count(own) == 1, err
    assert said.count(f"ps-worker: each shard starts in an interpreter of its own: {why}") == 1, err


def test_commands_say_what_they_do_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "pass")
    with serving("--sync", "bsp", "--workers", "2") as server:
        assert server.command.out.startswith(
            "ps-serve: loading kernels ...\nps-serve: importing torch ...\nps-serve: serves 1"
        )
        code, _, err = finished("ps-worker", "--server", server.address, "-n", "2", str(path), "5")
    lines = err.splitlines()
    assert code == 0 and lines[:4] == [
        "ps-worker: loading kernels ...", "ps-worker: importing torch ...", "ps-worker: starting 2 workers ...",
        "ps-worker: 1 of 2 workers joined ...",
    ]  # fmt: skip
    assert lines.count("ps-worker: 2 of 2 workers joined ...") == 1


def test_a_folder_with_modules_of_our_names_is_no_trouble(tmp_path: Path) -> None:
    """Shards run in the folder in which ps-serve was started, and import nothing from it."""
    for name in ("queue", "numpy", "narrows", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    with serving("--shards", "2", cwd=tmp_path) as server:
        os.kill(server.pids[0], signal.SIGINT)
        assert server.command.wait() == 130 and "not this one" not in server.command.err, server.command


def test_a_first_compilation_is_said_with_its_seconds(tmp_path: Path) -> None:
    """By `make install`, and by a run that lacks a kernel in the cache: here one, for all of them take half a minute."""
    warm_up()
    cache = tmp_path / "cache"
    for source in (ROOT / "compression").rglob("*.py"):
        place = cache / UserProvidedCacheLocator.get_suitable_cache_subpath(str(source))  # type: ignore[no-untyped-call]
        place.mkdir(parents=True, exist_ok=True)
        for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb?"):
            shutil.copy2(compiled, place)

    def forget() -> None:
        for path in [*cache.rglob("*encode_sign*")]:
            path.unlink()

    env = {"NUMBA_CACHE_DIR": str(cache)}
    forget()
    code, out, err = plain("-m", "narrows.compression", **env)
    began, ended = err.splitlines()
    assert code == 0 and not out and began == "compiling kernels, once per installation ..."
    assert re.fullmatch(r"compiled kernels, once per installation: \d+ s", ended)
    assert plain("-m", "narrows.compression", **env) == (0, "", "")
    forget()
    (tmp_path / "script.py").write_text("pass")
    code, _, err = finished("ps-worker", "--server", "tcp://127.0.0.1:1", str(tmp_path / "script.py"), env=env)
    assert code == 0 and err.count(f"ps-worker: {began}\n") == 1
    assert len(re.findall(r"^ps-worker: compiled kernels, once per installation: \d+ s$", err, re.M)) == 1, err
