"""Makes a forked process equal to a fresh interpreter that was started as `python WORDS`.

Rules
- If something cannot be equal in a forked process, the process becomes a fresh interpreter (exec).
- No frame of Narrows is in a traceback. The interpreter itself ends the process: exit code, exit handlers, threads,
  signals. Only a module of Narrows ends by `_leave`, because tearing down an interpreter writes to every page that the
  process shares with its fork server: 0.4 s of a core with torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, TracebackType

WORKER = "NARROWS_RECORD_FD"  # a worker has this variable until its session has begun; the session handles Ctrl-C then
OURS = "narrows."  # modules that end by `_leave`
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
    try:
        if code is None:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what the interpreter itself calls
        else:
            main = sys.modules["__main__"]  # as the interpreter made it: the fork server left no name in it
            main.__dict__.update(__file__=path, __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            exec(code, main.__dict__)
    except SystemExit as end:
        if module.startswith(OURS) and (end.code is None or isinstance(end.code, int)):
            _leave(end.code or 0)
        raise
    except BaseException:
        _hide_our_frames()
        raise


def _leave(code: int) -> None:
    """End this process as the interpreter ends it, but destroy no object. Returns if the output cannot be written."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls, as the next one
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        for file in (sys.stdout, sys.stderr):
            if file is not None and not file.closed:
                file.flush()
        os._exit(code & 0xFF)


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
