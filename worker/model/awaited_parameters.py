"""Parameters whose new values are still on their way: the first use of each waits for its own values.

How it works

    step() ends       begin       each parameter becomes an awaited one
    forward           layer 0     its weight is used: wait for the parts of the state that have it
                      layer 1     its parts have come meanwhile: it is a plain parameter again
    backward, step()  end         all parameters are plain

1. `begin` gives each parameter the class `_awaited`, a subclass of torch.nn.Parameter. Torch hands each call that gets
   one, such as a multiplication, `p.data` or `torch.stack([p])`, to `__torch_function__` of that class first, which
   calls `use`. So no hooks on modules are needed, and a script that reads a parameter outside forward() waits too.
2. `arrived` counts the keys of a part of the state. A parameter whose keys are all here gets its own class back, and
   costs nothing from then on.
3. If the keys of the state that comes are other ones (`recount`), `use` waits for all parameters.
4. What reads no value, such as `p.grad` and `p.shape`, does not wait (NO_VALUES).

Rules
- What goes past torch's Python functions does not wait: memory that a script took before step() (`p.data`, `p.numpy()`),
  and C++ extensions that are not registered as operators. TorchScript and torch.compile read parameters so too:
  `why_not` finds both.
- All uses hold `lock`, so threads of a script wait one after the other. A fork waits for all parameters first.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from narrows.protocols.config.key_ranges import Keys
from narrows.worker.model.flat import FlatModel, announce

ATTRIBUTES = (
    *("grad", "grad_fn", "requires_grad", "is_leaf", "retains_grad", "_version", "_backward_hooks", "output_nr"),
    *("shape", "ndim", "dtype", "layout", "device", "names", "nbytes", "itemsize", "is_cpu", "is_cuda", "is_meta"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "is_mps", "is_xpu"),
)
METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_conj", "is_neg", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "__len__"),
)
NO_VALUES = {
    getattr(getattr(torch.Tensor, name), each)
    for name in ATTRIBUTES
    for each in ("__get__", "__set__", "__delete__")
    if hasattr(torch.Tensor, name)
} | {
    *(getattr(torch.Tensor, name) for name in METHODS),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_conj),
}

_awaiting: weakref.WeakSet[AwaitedParameters] = weakref.WeakSet()


def why_not(flat: FlatModel) -> str:
    """Return why these parameters cannot be awaited one by one, for the whole run; "" if they can."""
    if any(type(parameter) is not torch.nn.Parameter for parameter in flat.parameters):
        return "a parameter has a class of its own"
    if any(isinstance(module, torch.jit.ScriptModule) for module in flat.model.modules()):
        return "TorchScript reads parameters"
    return ""


def compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process: such code checks the class of a parameter."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _awaited(use: Callable[[Iterable[torch.Tensor]], None]) -> type[torch.nn.Parameter]:
    """Make the class of parameters whose first use calls `use` with them, which makes plain parameters of them."""

    class AwaitedParameter(torch.nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func not in NO_VALUES:
                use([each for each in _tensors((args, kwargs)) if type(each) is cls])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            use([self])
            return self.__deepcopy__(memo)  # of the plain class

        def __reduce_ex__(self, protocol: Any) -> Any:
            use([self])
            return self.__reduce_ex__(protocol)

    return AwaitedParameter


class AwaitedParameters:
    """The parameters of a model, while a state is on its way.

    Args:
        flat: the parameters. `why_not` has found no reason against it.
        wait: handles events until its argument returns True.
        wait_all: waits until all values are here, and calls `end`.

    Attributes:
        pending: the time from `begin` to `end`.
        lock: is held while events are handled for a parameter.
    """

    def __init__(
        self, flat: FlatModel, wait: Callable[[Callable[[], bool]], None], wait_all: Callable[[], None]
    ) -> None:
        self.flat, self._wait, self._wait_all = flat, wait, wait_all
        self.lock = threading.RLock()
        self.pending = False
        self._pid = os.getpid()
        self._class = _awaited(self.use)
        self._index = {id(parameter): tensor for tensor, parameter in enumerate(flat.parameters)}
        self._left: dict[int, int] = {}  # tensor -> keys that are still to come
        self._seen: set[Keys] = set()  # parts that have come
        self._counts = True  # the keys of parts are counted
        _awaiting.add(self)

    def begin(self) -> None:
        """Await the values of all parameters. What comes counts as written now (`announce`)."""
        announce(self.flat, True)
        sizes = [end - begin for begin, end in zip(self.flat.offsets, self.flat.offsets[1:], strict=False)]
        self._left = {tensor: size for tensor, size in enumerate(sizes) if size}
        self._seen, self._counts, self.pending = set(), True, True
        for tensor in self._left:
            self.flat.parameters[tensor].__class__ = self._class

    def arrived(self, begin: int, end: int) -> None:
        """Note that keys [begin, end) have been written. A part may come more than once."""
        if not self.pending or not self._counts or (begin, end) in self._seen:
            return
        self._seen.add((begin, end))
        for tensor, low, high in self.flat.within(begin, end):
            self._left[tensor] -= high - low
            if not self._left[tensor]:
                self._here(tensor)

    def recount(self) -> None:
        """Note that another state will come, whose parts may be others: from now on a use waits for all."""
        self._counts = False

    def end(self) -> None:
        """Note that all values are here."""
        for tensor in list(self._left):
            self._here(tensor)
        announce(self.flat, False)
        self.pending = False

    def _here(self, tensor: int) -> None:
        del self._left[tensor]
        self.flat.parameters[tensor].__class__ = torch.nn.Parameter

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait until these parameters have their values."""
        with self.lock:
            used = [self._index[id(parameter)] for parameter in parameters]
            self._wait(lambda: not self._counts or not any(tensor in self._left for tensor in used))
            if any(tensor in self._left for tensor in used):
                self._wait_all()

    def use_all(self) -> None:
        """Wait until all parameters have their values, in the process that began to await them."""
        if self.pending and os.getpid() == self._pid:
            self._wait_all()


def _before_fork() -> None:
    """Wait for all parameters: a child process has no link over which they would come."""
    for each in list(_awaiting):
        with suppress(Exception):  # the session has ended: the next use raises the same error
            each.use_all()


os.register_at_fork(before=_before_fork)
