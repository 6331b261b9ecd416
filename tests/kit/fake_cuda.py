"""Builds the fake CUDA driver of fake_cuda.c, with which launch code runs on a machine without a GPU. Counts its calls.

A process that has loaded the library (`FakeCuda` does) finds it by its name from then on: cuda.bindings opens libcuda.so.1.
A subprocess finds it by `environment`. torch must not find it: a torch built for CUDA wants more than it has.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libcuda.so.1"
NAME_MAX = 2048  # bytes of a kernel's name, with its end
FLAGS = (
    "-O2",
    "-shared",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
    f"-Wl,-soname,{LIBRARY}",
)


def build(folder: Path) -> Path:
    """Compile the library.

    Args:
        folder: takes the library.

    Returns: the path of the library.

    Raises:
        FileNotFoundError: there is no C compiler. Tests skip with this message.
        RuntimeError: the compiler refuses the source.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("the fake CUDA driver needs a C compiler named cc or gcc")
    library = folder / LIBRARY
    compiled = subprocess.run([compiler, *FLAGS, "-o", str(library), str(SOURCE)], capture_output=True, text=True)
    if compiled.returncode:
        raise RuntimeError(f"{compiler} refuses {SOURCE.name}:\n{compiled.stderr}")
    return library


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which a subprocess loads the library of `folder`, to add to its environment."""
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else str(folder)}


class FakeLaunch(NamedTuple):
    """A launch that ran.

    Attributes:
        name: the kernel's, as its module has it.
        grid: blocks.
        block: threads of a block.
        stream: the handle.
        arguments: the address of kernelParams, an array of pointers to the arguments. The caller may have changed them since.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    arguments: int


class FakeCuda:
    """Calls the hooks of the library. The constructor loads the library, unless this process has loaded it.

    Args:
        library: the path, from `build`.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fake_calls.restype = self._library.fake_launches.restype = ctypes.c_ulong
        self._library.fake_arguments.restype = ctypes.c_void_p

    def calls(self, name: str) -> int:
        """Return how often a function of the API was called since the last reset, `cuMemAlloc` for example."""
        return int(self._library.fake_calls(name.encode()))

    def launches(self) -> int:
        """Return how many kernels ran since the last reset. A captured launch runs with each launch of its graph."""
        return int(self._library.fake_launches())

    def launch(self, i: int = 0) -> FakeLaunch:
        """Return a launch: 0 is the last one, 1 the one before.

        Raises:
            IndexError: there were not so many, or the library does not know it any more.
        """
        name, stream = ctypes.create_string_buffer(NAME_MAX), ctypes.c_ulong()
        grid, block = (ctypes.c_uint * 3)(), (ctypes.c_uint * 3)()
        if not self._library.fake_launch(i, name, NAME_MAX, grid, block, ctypes.byref(stream)):
            raise IndexError(f"the fake CUDA driver knows no launch {i}: {self.launches()} ran since the last reset")
        arguments = self._library.fake_arguments(i) or 0
        return FakeLaunch(
            name.value.decode(), (grid[0], grid[1], grid[2]), (block[0], block[1], block[2]), stream.value, arguments
        )

    def fail(self, name: str, code: int, times: int = 1) -> None:
        """Let the next calls of a function of the API return an error code, and do nothing else.

        600, CUDA_ERROR_NOT_READY, of cuEventQuery for example stands for work that goes on.

        Raises:
            KeyError: there is no such function.
        """
        if self._library.fake_fail(name.encode(), code, times):
            raise KeyError(f"the fake CUDA driver has no {name}")

    def reset(self) -> None:
        """Forget calls, launches and failures to come. Memory, streams, captures and modules stay."""
        self._library.fake_reset()
