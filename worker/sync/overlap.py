"""Gradients that leave while backward still runs, part by part, from autograd's own threads.

Rules
- A part leaves once every tensor in it has its gradient of the last backward of the step. The first part of each shard
  is empty and leaves at step(): it carries the hyper-parameters and names the tensors that got no gradient.
- Between backward and step() nothing may touch p.grad, since it has left: that is found by the tensor's version counter.
- Where the arrays live on a device, gradients are copied to pinned memory beside the backward pass. A part leaves once its last
  copy has landed; that is looked at when the next gradient comes, so backward waits for none.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from narrows.compression.home import HOST, Home, Landed, Landing
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import FRAME_VALUES
from narrows.worker.model.flat import Array, FlatModel, FloatArray, real

PARTS_AIM = 32  # parts of a shard: the more, the earlier each leaves
PART_VALUES_MIN = 1 << 18  # 1 MiB: a message of less costs more than the bytes in it

SAMPLE = 256  # values of a gradient that are looked at again: scaling or clamping one changes some of them

SendPart = Callable[[int, int, int, Keys, FloatArray], None]  # shard, part, parts, and the values of these keys


class GradientOverlap:
    """Hooks on every parameter of `flat`; `accumulate` backward passes make one step. `home`: see Arrays."""

    def __init__(
        self,
        flat: FlatModel,
        ranges: list[tuple[int, int]],
        accumulate: int,
        send: SendPart,
        home: Home[Array] = HOST,
    ) -> None:
        self.flat, self.accumulate, self.send, self.home = flat, accumulate, send, home
        self.lock = threading.Lock()
        self.target: FloatArray | None = None
        self.pid = os.getpid()  # a backward pass in a forked process is no part of a step
        self.sent_early = 0  # parts that left during the last backward: for traces
        self.cut(ranges)
        for tensor, parameter in enumerate(flat.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(tensor))

    def cut(self, ranges: list[tuple[int, int]]) -> None:
        """The parts of each of these shards; between two steps."""
        flat, self.cuts = self.flat, list[list[Keys]]()
        for begin, end in ranges:
            values = min(FRAME_VALUES, max(PART_VALUES_MIN, (end - begin) // PARTS_AIM))
            self.cuts.append([(begin, begin), *parts(begin, end, values)])
        self.parts_of: list[list[tuple[int, int]]] = [[] for _ in flat.parameters]
        self.tensors_in: list[list[int]] = [[0] * len(cuts) for cuts in self.cuts]
        for shard, cuts in enumerate(self.cuts):
            for part, (begin, end) in enumerate(cuts):
                for tensor in range(len(flat.parameters)):
                    if flat.offsets[tensor] < end and begin < flat.offsets[tensor + 1] and begin < end:
                        self.parts_of[tensor].append((shard, part))
                        self.tensors_in[shard][part] += 1
        self._begin()

    def _begin(self) -> None:
        self.left = [list(counts) for counts in self.tensors_in]
        self.calls = [0] * len(self.flat.parameters)
        self.versions: list[tuple[int, int]] = [(0, -1)] * len(self.flat.parameters)
        self.gone: set[tuple[int, int]] = set()
        self.landing: deque[tuple[int, int, Landing]] = deque()  # parts on their way to the host
        self.copied: list[torch.Tensor] = []  # what they are copied from
        self.last: Landing = Landed()  # once it is done, all are

    def _hook(self, tensor: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if os.getpid() != self.pid:
                return
            with self.lock:
                self.calls[tensor] += 1
                if self.calls[tensor] == self.accumulate and self.target is not None:
                    self._copy(tensor, parameter)

        return ready

    def _copy(self, tensor: int, parameter: torch.Tensor) -> None:
        assert self.target is not None and parameter.grad is not None
        if parameter.grad.is_sparse:
            raise UsageError(f"the gradient of {self.flat.names[tensor]!r} is sparse: use --push update")
        out = self.target[slice(*self.flat.offsets[tensor : tensor + 2])]
        with torch.no_grad():
            landing = self.last = self._land(parameter.grad, out)
        self.versions[tensor] = (id(parameter.grad), parameter.grad._version)
        for shard, part in self.parts_of[tensor]:
            self.left[shard][part] -= 1
            if self.left[shard][part] == 0 and part != 0:
                self.landing.append((shard, part, landing))
        self._leave()

    def _land(self, gradient: torch.Tensor, out: FloatArray) -> Landing:
        if self.home is HOST:
            numbers = real(gradient)
            torch.from_numpy(out).view(numbers.shape).copy_(numbers)
            return Landed()
        flat = real(gradient.detach()).reshape(-1).float()  # a copy, where it is not float32 or not contiguous
        self.copied.append(flat)
        return self.home.land(flat, out)

    def _leave(self) -> None:
        """Send the parts that have landed."""
        while self.landing and self.landing[0][2].done():
            self._send(*self.landing.popleft()[:2])

    def _send(self, shard: int, part: int) -> None:
        assert self.target is not None
        keys = self.cuts[shard][part]
        self.gone.add((shard, part))
        self.send(shard, part, len(self.cuts[shard]), keys, self.target[slice(*keys)])

    def _touched(self, tensor: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is not what left: by its version counter, and by a sample, for `p.grad.data` has no counter."""
        if (id(gradient), gradient._version) != self.versions[tensor]:
            return True
        if gradient.device.type != "cpu":
            return False  # looking would wait for the device
        assert self.target is not None
        numbers = real(gradient.detach()).reshape(-1)
        stride = 1 + numbers.numel() // SAMPLE
        sent = torch.from_numpy(self.target[self.flat.offsets[tensor] : self.flat.offsets[tensor + 1]])[::stride]
        now = numbers[::stride].float()
        return not bool(((sent == now) | sent.isnan()).all())

    def open(self, target: FloatArray) -> None:
        """The next backward may fill and send `target`, which stays untouched until its push is settled."""
        with self.lock:
            self.target = target

    def drop(self) -> None:
        """Forget the step under way: its gradients count for nothing."""
        with self.lock:
            self.last.wait()  # this memory is filled again
            self.target = None
            self._begin()

    def close(self) -> tuple[FloatArray, list[int]]:
        """At step(): send all parts but the first of each shard. Returns the gradients and the tensors without any."""
        with self.lock:
            assert self.target is not None
            self.sent_early = len(self.gone)
            self.last.wait()
            self._leave()
            absent = []
            for tensor, parameter in enumerate(self.flat.parameters):
                if self.calls[tensor] == 0:
                    absent.append(tensor)
                    self.target[self.flat.offsets[tensor] : self.flat.offsets[tensor + 1]] = 0
                elif self.calls[tensor] != self.accumulate:
                    raise UsageError(
                        f"{self.flat.names[tensor]!r} got {self.calls[tensor]} gradients this step, not {self.accumulate}: "
                        "tell DistributedOptimizer(overlap=True, accumulate=...) how many backward passes make a step"
                    )
                elif parameter.grad is None or self._touched(tensor, parameter.grad):
                    raise UsageError(
                        f"the gradient of {self.flat.names[tensor]!r} was changed between backward() and step(), but with "
                        "overlap=True it has left already: clip with max_grad_norm=, or leave out overlap=True"
                    )
            for shard, cuts in enumerate(self.cuts):
                for part in range(1, len(cuts)):
                    if (shard, part) not in self.gone:
                        self._send(shard, part)
            flat, self.target = self.target, None
            self._begin()
            return flat, absent
