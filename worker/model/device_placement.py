"""Chooses the device of a worker's arrays: the device of its parameters, if there are kernels for it; else the host.

NARROWS_ARRAYS=host keeps the arrays on the host, and parameters on a GPU are copied. NARROWS_ARRAYS=device, for tests,
treats parameters on the CPU as a device's, with the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from narrows.compression.device.home import DeviceHome
from narrows.compression.device.kernels import HOST as HOST_DEVICE
from narrows.compression.device.kernels import kernels_for
from narrows.compression.home import HOST, Home
from narrows.worker.model.flat import FlatModel
from narrows.worker.runtime.config import told

CUDA = "cuda"


def home_of(flat: FlatModel, why_host: str = "") -> tuple[Home[Any], str]:
    """Choose where the arrays of this worker live.

    Args:
        flat: the parameters.
        why_host: the reason why the arrays must stay on the host; "": none.

    Returns:
        The home, and a sentence for the user if parameters on a GPU are copied through the CPU; else "".
    """
    devices = {parameter.device for parameter in flat.parameters}
    device = next(iter(devices))
    wanted = told("arrays")
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


def warm_up(say: Callable[[str], None]) -> None:
    """Compile the kernels of the GPU that the script uses already: in a run that would stop it for seconds.

    Args:
        say: called with a line while kernels are compiled.
    """
    if torch.cuda.is_initialized() and told("arrays") != "host":
        with suppress(RuntimeError):  # `home_of` reports it once the model is known
            device_home(torch.device(CUDA, torch.cuda.current_device()), say)


_of_gpus: dict[int, DeviceHome[torch.Tensor]] = {}  # by GPU number: a process has one home for each


def device_home(device: torch.device, say: Callable[[str], None] = lambda text: None) -> DeviceHome[torch.Tensor]:
    """Return the home on a device.

    Args:
        device: a GPU, or the CPU in place of one.
        say: called with a line while kernels are compiled.

    Raises:
        RuntimeError: there are no kernels for this device, or they do not work here.
    """

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float32, device=device)

    if device.type != CUDA:
        return DeviceHome(kernels_for(HOST_DEVICE), zeros, f"{device} as a device")

    def allocate(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=device)  # from torch's memory pool

    def stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    number = torch.cuda.current_device() if device.index is None else device.index
    if number in _of_gpus:
        return _of_gpus[number]
    kernels = kernels_for(f"{CUDA}:{number}", allocate, stream)
    home = DeviceHome(kernels, zeros, f"{CUDA}:{number}")
    try:
        home.warm_up(say)
    except Exception as error:  # a compiler or driver may raise anything; the host's kernels always work
        raise RuntimeError(f"its kernels do not work here ({type(error).__name__}: {error})") from error
    _of_gpus[number] = home
    return home
