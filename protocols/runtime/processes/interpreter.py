"""Makes a forked process equal to a fresh interpreter that was started as `python WORDS`.

Rules
- If something cannot be equal in a forked process, the process becomes a fresh interpreter (exec).
- No frame of Narrows is in a traceback. The interpreter itself handles errors, signals, threads and exit handlers.
- The last exit handler ends a process that has an exit code (`_leave`). The interpreter would destroy each object of torch,
  and so copy each page that the process shares with its fork server: 0.4 s of a core and 0.2 GB of memory. `_leave`
  destroys what the script and its modules hold, and flushes what they have written. A module of Narrows has nothing to destroy.
- A process that ends by an error, or has threads of the script at its end, is torn down by the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

WORKER = "NARROWS_RECORD_FD"  # a worker has this variable until its session has begun; the session handles Ctrl-C then
OURS = "narrows."  # modules that have nothing to destroy
OUR_THREADS = "narrows-"
COMM_CHARACTERS = 15  # of a process's name, at most (Linux)
BLAS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


def begin(name: str, env: Mapping[str, str]) -> None:
    """Take this environment, and renew what no two processes may share, such as random seeds."""
    forked = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:COMM_CHARACTERS])
    # Python seeds its own generator anew at a fork. On a device torch begins with the same seed in every process.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    tempfile.tempdir = None  # tempfile looks it up again, in the new environment
    changed = {key: int(env[key]) for key in THREADS if env.get(key, "").isdigit() and env[key] != forked.get(key)}
    for key, count in changed.items():
        THREADS[key](count)


def _torch_threads(count: int) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def _blas_threads(count: int) -> None:
    """Set the threads of NumPy's OpenBLAS, which reads its variable when loaded; at most one for each core."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in BLAS:
            if hasattr(library, name):
                getattr(library, name)(min(count, len(os.sched_getaffinity(0))))


# Libraries read these variables when they are loaded, which was before the fork.
THREADS = {"OMP_NUM_THREADS": _torch_threads, "OPENBLAS_NUM_THREADS": _blas_threads}


def run(words: list[str]) -> None:
    """Run SCRIPT ARGS or -m MODULE ARGS as __main__, to its end."""
    module = words[1] if words[0] == "-m" else ""
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(words[0]))
    folders = [] if os.environ.get("PYTHONSAFEPATH") else [folder]
    path = os.path.join(os.getcwd(), words[0])
    code = None if module else _code(path)
    # exec, because a module that is imported already would run a second time, with a warning.
    if any(map(_shadows, folders)) or (module in sys.modules if module else code is None):
        os.execv(sys.executable, [sys.executable, *words])
    sys.orig_argv = [sys.executable, *words]
    sys.argv = [words[0], *words[2:]] if module else words
    sys.path[:0] = folders
    # Names as the interpreter made them: the fork server left none. Its own dict is frozen, and would not be destroyed.
    main = ModuleType("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
    try:
        if code is None:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what the interpreter itself calls
        else:
            main.__dict__.update(__file__=path, __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            exec(code, main.__dict__)
        _ends(module, 0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _ends(module, end.code or 0)
        raise
    except BaseException:
        _hide_our_frames()
        raise


@dataclass
class _End:
    """What `_leave` has to know."""

    inherited: frozenset[str] = frozenset()  # modules that the fork server has imported
    code: int | None = None  # the exit code; None: the interpreter knows it
    destroys: bool = True


_end = _End()


def will_fork(first: bool = False) -> None:
    """Called by a fork server before its first import and after each: tell modules of scripts from modules that all share.

    A child's exit runs no finalizer of a shared object. The finalizers of torch alone cost 8,000 page faults.

    Args:
        first: exit handlers of what is imported from now on run before `_leave`.
    """
    if first:
        atexit.register(_leave)
    _end.inherited = frozenset(sys.modules)
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        each.atexit = False


def _ends(module: str, code: int) -> None:
    _end.code, _end.destroys = code, not module.startswith(OURS)


def _leave() -> None:
    """End this process with its exit code, as the last exit handler.

    Returns, so that the interpreter ends the process, if it has no exit code, if another thread may see what is destroyed, or
    if the output cannot be written.
    """
    if _end.code is None or (_end.destroys and _may_see()) or os.environ.get("PYTHONINSPECT"):
        return
    with contextlib.suppress(Exception):
        _flush()
        if _end.destroys:
            _destroy()
            _flush()
        os._exit(_end.code & 0xFF)


def _may_see() -> bool:
    """Return whether a thread may run code of the script. Threads of Narrows hold nothing that is destroyed."""
    ours = sum(thread.name.startswith(OUR_THREADS) for thread in threading.enumerate())
    return len(sys._current_frames()) > 1 + ours


def _flush() -> None:
    """Write what is in buffers: of each file that the script has opened, then of C, then of Python's own files.

    Raises what Python's own files raise. The interpreter says nothing of the others either.
    """
    for each in gc.get_objects() if _end.destroys else ():
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    ctypes.CDLL(None).fflush(None)
    for file in (sys.stdout, sys.stderr):
        if file is not None and not getattr(file, "closed", False):
            file.flush()


def _destroy() -> None:
    """Destroy what the script and its modules hold, in the interpreter's order."""
    vars(sys).update(stdin=sys.__stdin__, stdout=sys.__stdout__, stderr=sys.__stderr__)
    later = [*takewhile(lambda name: name not in _end.inherited, reversed(sys.modules))]  # reads no name that all share
    taken = [sys.modules.pop(name, None) for name in (*later, "__main__")]
    modules = [weakref.ref(module) for module in taken if isinstance(module, ModuleType)]
    del taken
    gc.collect()
    for reference in modules:
        if (alive := reference()) is not None:
            _clear(vars(alive))
        del alive
    gc.collect()


def _clear(names: dict[str, Any]) -> None:
    """Forget the objects of a module: first those whose names have one underscore."""
    for private in (True, False):
        for name in [*names]:
            if name != "__builtins__" and (str(name)[:1] == "_" != str(name)[1:2]) is private:
                names[name] = None


def _code(path: str) -> CodeType | None:
    """Return the code of a script; None for anything else: an option, a folder, a zip file, text that is not Python."""
    try:
        with io.open_code(path) as file:
            return compile(importlib.util.decode_source(file.read()), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None


def _shadows(folder: str) -> bool:
    """True if a module beside the script has the name of a module that the fork server has imported already."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(
            entry.name.endswith(suffixes) or os.path.isfile(os.path.join(entry.path, "__init__.py"))
            for entry in entries
            if entry.name.partition(".")[0] in sys.modules and not entry.name.startswith("__")
        )
    return False


def _hide_our_frames() -> None:
    """Have the interpreter show the error that is being raised without the frames of this package."""
    shows = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = True
        while trace is not None and ours:
            ours = trace.tb_frame.f_code is not run.__code__
            trace = trace.tb_next
        if kind is not KeyboardInterrupt or WORKER not in os.environ:  # ps-worker says that it was interrupted
            shows(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
