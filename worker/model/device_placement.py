"""Which device a worker's arrays live on: that of its parameters, where there are kernels for it.

NARROWS_ARRAYS=host: arrays stay on the host, and parameters on a GPU are copied. NARROWS_ARRAYS=device, for tests: parameters
on the CPU are taken for a device's, and the CPU's kernels for its own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from narrows.compression.device.home import DeviceHome
from narrows.compression.device.kernels import HOST as HOST_DEVICE
from narrows.compression.device.kernels import kernels_for
from narrows.compression.home import HOST, Home
from narrows.worker.model.flat import FlatModel

CUDA = "cuda"


def home_of(flat: FlatModel, why_host: str = "") -> tuple[Home[Any], str]:
    """Where the arrays of this worker live, and what to say of it, or "". why_host: why they stay on the host, or ""."""
    devices = {parameter.device for parameter in flat.parameters}
    device = next(iter(devices))
    wanted = os.environ.get("NARROWS_ARRAYS", "")
    if device.type != CUDA and not (wanted == "device" and device.type == "cpu"):
        return HOST, ""
    if wanted == "host":
        why_host = "NARROWS_ARRAYS=host"
    if len(devices) > 1:
        why_host = f"the parameters are on {len(devices)} devices"
    if not why_host:
        try:
            return device_home(device), ""
        except RuntimeError as error:
            why_host = str(error)
    return HOST, f"parameters on {device} are copied through the CPU: {why_host}"


def warm_up() -> None:
    """Compile the kernels of the GPU that the script has begun to use: later that would hold up a run for seconds."""
    if torch.cuda.is_initialized() and os.environ.get("NARROWS_ARRAYS") != "host":
        with suppress(RuntimeError):  # which is told where the model is known
            device_home(torch.device(CUDA, torch.cuda.current_device()))


_of_gpus: dict[int, DeviceHome[torch.Tensor]] = {}  # a process has one of each


def device_home(device: torch.device) -> DeviceHome[torch.Tensor]:
    """On this device. Raises RuntimeError where there are no kernels for it."""

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float32, device=device)

    if device.type != CUDA:
        return DeviceHome(kernels_for(HOST_DEVICE), zeros, f"{device} as a device")

    def allocate(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=device)  # of torch's pool

    def stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    number = torch.cuda.current_device() if device.index is None else device.index
    if number in _of_gpus:
        return _of_gpus[number]
    kernels = kernels_for(f"{CUDA}:{number}", allocate, stream)
    home = DeviceHome(kernels, zeros, f"{CUDA}:{number}")
    try:
        home.warm_up()
    except Exception as error:  # whatever a compiler or a driver may raise: the host's kernels always work
        raise RuntimeError(f"its kernels do not work here ({type(error).__name__}: {error})") from error
    _of_gpus[number] = home
    return home
