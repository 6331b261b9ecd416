"""Finds the kernels for a device."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

MISSING = (
    "compression on a GPU needs an NVIDIA GPU with its driver, and numba-cuda: pip install 'narrows[cuda]', or "
    "'narrows[cuda12]' for drivers below 580; "
    "without them use what narrows.compression has for the CPU"
)
HOST = "host"


def _driver(number: int) -> Any:
    try:
        return import_module("narrows.compression.cuda.queue").driver_of(number)
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"{MISSING} ({error})") from error


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
    driver = _driver(int(number or 0))
    kernels, queue = (import_module(f"narrows.compression.cuda.{name}") for name in ("kernels", "queue"))
    return kernels.CudaKernels(queue.Queue(driver, allocate, current))
