"""Finds the kernels for a device."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

MISSING = (
    "compression on a GPU needs an NVIDIA GPU with its driver, and numba-cuda: pip install 'narrows[cuda]', or "
    "'narrows[cuda12]' for drivers below 580; "
    "without them use what narrows.compression has for the CPU"
)
HOST = "host"


@functools.cache
def _cuda() -> Any:
    try:
        if import_module("numba.cuda").is_available():
            return import_module("narrows.compression.cuda.kernels"), import_module("narrows.compression.cuda.queue")
    except ImportError as error:
        raise RuntimeError(MISSING) from error
    raise RuntimeError(MISSING)


def kernels_for(device: str, allocate: Any = None, current: Callable[[], int] = lambda: 0) -> Any:
    """Return new kernels for a device, with their own queue and scratch memory. One thread at a time may use them.

    Args:
        device: "cuda:N", or "host" for the CPU in place of a GPU (host.py).
        allocate, current: for a GPU, as in `Queue`.

    Raises:
        RuntimeError: there is no such device, or numba-cuda is absent.
    """
    if device == HOST:
        from narrows.compression.device.host import HostKernels

        return HostKernels()
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise RuntimeError(f"there are no kernels for {device}, only for cuda:N")
    kernels, queue = _cuda()
    return kernels.CudaKernels(queue.Queue(int(number or 0), allocate, current))
