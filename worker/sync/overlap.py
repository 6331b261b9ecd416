"""Gradients that leave while backward still runs, part by part, from autograd's own threads.

    backward:  gradient of tensor 9 ── 8 ── 7 ── 6 ── ... ── 0        step()
    parts:          part 3 of shard 1 leaves ─┘    part 2 ─┘            part 0 of each shard, with hyper-parameters

Rules
- A part leaves once each tensor in it has its gradient of the step's last backward pass. The first part of each shard
  is empty and leaves at step(): it carries the hyper-parameters and names the tensors that got no gradient.
- Between backward and step() nothing may change p.grad, since it has left. `close` finds a change by the tensor's
  version counter.
- If the arrays live on a device, gradients are copied to pinned memory beside the backward pass. A part leaves once its
  last copy has landed. The hook of the next gradient checks that, so backward waits for no copy.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from narrows.compression.home import HOST, Home, LandedPayload, Landing
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import FRAME_VALUES
from narrows.worker.model.flat import Array, FlatModel, FloatArray, real

PARTS_AIM = 32  # parts of a shard's keys: more parts leave earlier
PART_VALUES_MIN = 1 << 18  # values of a part, 1 MiB: a smaller message costs more than its bytes

SAMPLE = 256  # values of a gradient that close() compares: scaling or clamping changes some of them

SendPart = Callable[[int, int, int, Keys, FloatArray], None]  # shard, part, parts, and the values of these keys


class GradientOverlap:
    """Hooks on every parameter, which send its gradient during the last backward pass of a step.

    Args:
        flat: the parameters.
        ranges: the keys [begin, end) of each shard.
        accumulate: backward passes of a step.
        send: sends one part; autograd's threads call it.
        home: where the worker's arrays live.
        begins: called in a backward pass before the first gradients leave: it may call `open`.
    """

    def __init__(
        self,
        flat: FlatModel,
        ranges: list[tuple[int, int]],
        accumulate: int,
        send: SendPart,
        home: Home[Array] = HOST,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.flat, self.accumulate, self.send, self.home, self.begins = flat, accumulate, send, home, begins
        self.lock = threading.Lock()
        self.target: FloatArray | None = None
        self.pid = os.getpid()  # in a forked process the hooks do nothing
        self.sent_early = 0  # parts that left during the last backward pass, for traces
        self.cut(ranges)
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(tensor))
            for tensor, parameter in enumerate(flat.parameters)
        ]

    def end(self) -> None:
        """Remove the hooks: no gradient leaves early any more."""
        for hook in self.hooks:
            hook.remove()
        self.drop()

    def cut(self, ranges: list[tuple[int, int]]) -> None:
        """Cut the keys of each shard into parts. It is called between two steps only."""
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
        self.landing: deque[tuple[int, int, Landing]] = deque()  # shard, part and its copy
        self.copied: list[torch.Tensor] = []  # keeps the sources of these copies alive
        self.last: Landing = LandedPayload()  # the newest copy: when it is done, all are

    def _hook(self, tensor: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if os.getpid() != self.pid:
                return
            if self.target is None:
                self.begins()
            with self.lock:
                self.calls[tensor] += 1
                if self.calls[tensor] == self.accumulate and self.target is not None and parameter.grad is not None:
                    self._copy(tensor, parameter.grad, self.target)

        return ready

    def _copy(self, tensor: int, gradient: torch.Tensor, target: FloatArray) -> None:
        if gradient.is_sparse:
            raise UsageError(f"the gradient of {self.flat.names[tensor]!r} is sparse: use --push update")
        out = target[slice(*self.flat.offsets[tensor : tensor + 2])]
        with torch.no_grad():
            landing = self.last = self._land(gradient, out)
        self.versions[tensor] = (id(gradient), gradient._version)
        for shard, part in self.parts_of[tensor]:
            self.left[shard][part] -= 1
            if self.left[shard][part] == 0 and part != 0:
                self.landing.append((shard, part, landing))
        self._leave(target)

    def _land(self, gradient: torch.Tensor, out: FloatArray) -> Landing:
        if self.home is HOST:
            numbers = real(gradient)
            torch.from_numpy(out).view(numbers.shape).copy_(numbers)
            return LandedPayload()
        flat = real(gradient.detach()).reshape(-1).float()  # a copy, if not float32 or not contiguous
        self.copied.append(flat)
        return self.home.land(flat, out)

    def _leave(self, target: FloatArray) -> None:
        """Send the parts that have landed."""
        while self.landing and self.landing[0][2].done():
            self._send(*self.landing.popleft()[:2], target)

    def _send(self, shard: int, part: int, target: FloatArray) -> None:
        keys = self.cuts[shard][part]
        self.gone.add((shard, part))
        self.send(shard, part, len(self.cuts[shard]), keys, target[slice(*keys)])

    def _touched(self, tensor: int, gradient: torch.Tensor, target: FloatArray) -> bool:
        """Return whether a gradient was changed after it left.

        Its version counter shows most changes. A sample of its values shows those through `p.grad.data`, which has no
        counter.
        """
        if (id(gradient), gradient._version) != self.versions[tensor]:
            return True
        if gradient.device.type != "cpu":
            return False  # a comparison would wait for the device
        numbers = real(gradient.detach()).reshape(-1)
        stride = 1 + numbers.numel() // SAMPLE
        sent = torch.from_numpy(target[self.flat.offsets[tensor] : self.flat.offsets[tensor + 1]])[::stride]
        now = numbers[::stride].float()
        return not bool(((sent == now) | sent.isnan()).all())

    def open(self, target: FloatArray) -> None:
        """Let the next backward pass fill and send `target`, float32[size].

        No other code changes `target` until its push is settled.
        """
        with self.lock:
            self.target = target

    def drop(self) -> None:
        """Forget the gradients of the step in progress."""
        with self.lock:
            self.last.wait()  # the next step fills the same memory
            self.target = None
            self._begin()

    def close(self) -> tuple[FloatArray, list[int]]:
        """Send the parts that have not left, except the first of each shard, which the caller sends.

        Returns:
            The gradients, float32[size], and the indices of the tensors without a gradient.

        Raises:
            UsageError: a gradient was changed since backward, or the number of backward passes is not `accumulate`.
        """
        with self.lock:
            target = self.target
            assert target is not None
            self.sent_early = len(self.gone)
            self.last.wait()
            self._leave(target)
            absent = []
            for tensor, parameter in enumerate(self.flat.parameters):
                if self.calls[tensor] == 0:
                    absent.append(tensor)
                    target[self.flat.offsets[tensor] : self.flat.offsets[tensor + 1]] = 0
                elif self.calls[tensor] != self.accumulate:
                    raise UsageError(
                        f"{self.flat.names[tensor]!r} got {self.calls[tensor]} gradients this step, not {self.accumulate}: "
                        "tell DistributedOptimizer(overlap=True, accumulate=...) how many backward passes make a step"
                    )
                elif parameter.grad is None or self._touched(tensor, parameter.grad, target):
                    raise UsageError(
                        f"the gradient of {self.flat.names[tensor]!r} was changed between backward() and step(), but with "
                        "overlap=True it has left already: clip with max_grad_norm=, or leave out overlap=True"
                    )
            for shard, cuts in enumerate(self.cuts):
                for part in range(1, len(cuts)):
                    if (shard, part) not in self.gone:
                        self._send(shard, part, target)
            self.target = None
            self._begin()
            return target, absent
