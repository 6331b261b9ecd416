"""Machine code of the kernels, on disk: processes of their own compile each kernel once for a GPU and an installation.

- A file has one kernel. Its folder is named by a digest of all that decides the code: sources, versions, the GPU.
- A cubin is code: the folder belongs to the user alone (`own_folder`). Files come by rename, and begin with a digest of
  what follows, so a torn or damaged one is compiled again.
- One process of a machine compiles, and the others wait for it. Where no folder can be
  written to, each process compiles for itself, and keeps the code in memory.

`python -m narrows.compression.cuda.cubins MAJOR MINOR` is a compiler process: it reads names of kernels, one a line, and
answers each with a line of JSON.
"""

from __future__ import annotations

import base64
import fcntl
import gc
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from narrows.compression.cuda import jit
from narrows.compression.cuda.jit import KERNELS, Arch, Cubin
from narrows.compression.kernels.jit import own_folder

PROCESSES_MAX = 8
COMPILE_S = 300.0  # for all kernels: 25 s of one core, on a busy machine too
FOLDERS_MAX = 4  # of earlier versions and other GPUs, which are kept
PAUSE_S = 0.1
DIGEST_BYTES = 32
MODULES = (
    "grouped",
    "indices",
    "landing",
    "levels",
    "random",
    "rice",
    "scans",
    "select",
    "sums",
    "values",
)  # of kernels

Say = Callable[[str], None]
SAY_S = 2.0  # between two lines about the same compilation


def load_kernels() -> None:
    """Import the modules of all kernels, so that `KERNELS` has them."""
    for name in MODULES:
        import_module(f"narrows.compression.cuda.{name}")


def digest_of(arch: Arch) -> str:
    """Return a digest of all that decides the code of the kernels for a GPU."""
    root = Path(__file__).resolve().parent.parent
    known = hashlib.sha256(repr((arch, sys.version_info[:3], jit.compiler_versions(), jit.THREADS)).encode())
    for source in sorted(root.rglob("*.py")):
        known.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    return known.hexdigest()[:24]


class CubinStore:
    """The machine code of all kernels for one GPU, on disk and in memory.

    Args:
        arch: the compute capability.
        home: the folder of the user's compiled kernels; None: there is none, and nothing is kept.
    """

    def __init__(self, arch: Arch, home: Path | None = None) -> None:
        self.arch = arch
        home = home or own_folder()
        self.folder = home / f"cuda-{arch[0]}{arch[1]}-{digest_of(arch)}" if home else None
        self.known: dict[str, Cubin] = {}

    def get(self, name: str) -> Cubin:
        """Return the code of a kernel. Errors as in `fill`."""
        if name not in self.known:
            load_kernels()
            self.fill(sorted(KERNELS))
        return self.known[name]

    def fill(self, names: Sequence[str], say: Say = lambda text: None) -> None:
        """Load or compile these kernels. One process of the machine compiles, and the others wait and load.

        Args:
            names: of the kernels.
            say: called every SAY_S with a line while kernels are compiled.

        Raises:
            RuntimeError: a kernel cannot be compiled here, or the compiler takes longer than COMPILE_S.
        """
        if not self._missing(names):
            return
        with self._alone(time.monotonic() + COMPILE_S, say):
            if missing := self._missing(names):
                self._compile(missing, time.monotonic() + COMPILE_S, say)
                self._prune()

    def _missing(self, names: Sequence[str]) -> list[str]:
        """Load what is on disk; return the names of which nothing is."""
        for name in names:
            if name not in self.known and (cubin := self._read(name)) is not None:
                self.known[name] = cubin
        return [name for name in names if name not in self.known]

    @contextmanager
    def _alone(self, deadline: float, say: Say) -> Iterator[None]:
        """Wait until no other process compiles for this folder, at most until `deadline`; without a folder, not at all."""
        file, told = None, False
        with suppress(OSError):
            if self.folder is not None:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                file = open(self.folder / "lock", "wb")  # noqa: SIM115 - closed below
        try:
            while file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # another process compiles
                    if time.monotonic() > deadline:
                        break
                    if not told:
                        say("another process compiles kernels for the GPU; waiting for it ...")
                    told = True
                    time.sleep(PAUSE_S)
                except OSError:  # this file system has no locks: each process compiles
                    break
            yield
        finally:
            if file is not None:
                file.close()

    def _compile(self, names: list[str], deadline: float, say: Say) -> None:
        """Compile kernels in processes of their own, which share a queue of names."""
        of = f"compiling kernels for sm_{self.arch[0]}{self.arch[1]}"
        left: queue.SimpleQueue[str] = queue.SimpleQueue()
        found: queue.SimpleQueue[tuple[str, Cubin | str]] = queue.SimpleQueue()
        for name in names:
            left.put(name)
        count = max(1, min(len(os.sched_getaffinity(0)), PROCESSES_MAX, len(names)))
        compilers = [_Compiler(self.arch, left, found) for _ in range(count)]
        next_s = time.monotonic()
        try:
            for done in range(len(names)):
                if time.monotonic() >= next_s:
                    say(f"{of}: {done} of {len(names)}")
                    next_s += SAY_S
                try:
                    name, cubin = found.get(timeout=max(deadline - time.monotonic(), 0.01))
                except queue.Empty:
                    raise RuntimeError(f"{of} took longer than {COMPILE_S:.0f} s") from None
                if isinstance(cubin, str):
                    raise RuntimeError(f"the kernel {name} does not compile: {cubin}")
                self.known[name] = cubin
                self._write(name, cubin)
        finally:
            for compiler in compilers:
                compiler.end()

    # Files.

    def _read(self, name: str) -> Cubin | None:
        if self.folder is None:
            return None
        with suppress(OSError, ValueError, TypeError):
            whole = (self.folder / f"{name}.cubin").read_bytes()
            if hashlib.sha256(whole[DIGEST_BYTES:]).digest() == whole[:DIGEST_BYTES]:
                head, _, code = whole[DIGEST_BYTES:].partition(b"\n")
                return Cubin(code, **json.loads(head))
        return None

    def _write(self, name: str, cubin: Cubin) -> None:
        if self.folder is None:
            return
        body = json.dumps({key: value for key, value in cubin._asdict().items() if key != "code"}).encode()
        body += b"\n" + cubin.code
        new = self.folder / f"{name}.{os.getpid()}.tmp"
        try:
            new.write_bytes(hashlib.sha256(body).digest() + body)
            os.replace(new, self.folder / f"{name}.cubin")
        except OSError:  # full, or read-only: the code stays in memory
            with suppress(OSError):
                new.unlink()

    def _prune(self) -> None:
        """Delete the folders of the oldest versions."""
        if self.folder is not None:
            with suppress(OSError):
                others = [each for each in self.folder.parent.glob("cuda-*") if each != self.folder]
                for old in sorted(others, key=lambda each: each.stat().st_mtime)[:-FOLDERS_MAX]:
                    shutil.rmtree(old, ignore_errors=True)


class _Compiler:
    """A compiler process, and a thread that gives it names."""

    def __init__(
        self, arch: Arch, left: queue.SimpleQueue[str], found: queue.SimpleQueue[tuple[str, Cubin | str]]
    ) -> None:
        environment = os.environ | jit.COMPILER_ENVIRONMENT
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, arch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
        )
        self.left, self.found = left, found
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        name = ""
        try:
            assert self.process.stdin is not None and self.process.stdout is not None
            while True:
                name = self.left.get_nowait()
                self.process.stdin.write(f"{name}\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
                told = json.loads(line) if line else {"error": self._last_error()}
                self.found.put((name, told["error"] if "error" in told else _cubin_of(told)))
        except queue.Empty:
            return
        except (OSError, ValueError):  # the process has ended
            self.found.put((name, self._last_error()))

    def _last_error(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"the compiler has ended with {self.process.returncode}{': ' + lines[-1] if lines else ''}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.errors.close()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert stream is not None
                stream.close()


def _cubin_of(told: dict[str, Any]) -> Cubin:
    return Cubin(**told | {"code": base64.b64decode(told["code"])})


def _compile_as_asked(arch: Arch) -> None:
    """Compile what stdin names, until it ends."""
    load_kernels()
    gc.disable()  # a compiler makes millions of objects, and this process lives for seconds
    for line in sys.stdin:
        try:
            cubin = jit.linked(jit.ptx_of(line.strip(), arch), arch)
            told = cubin._asdict() | {"code": base64.b64encode(cubin.code).decode()}
        except Exception as error:  # a compiler may raise anything; the other end shows it
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _compile_as_asked((int(sys.argv[1]), int(sys.argv[2])))
