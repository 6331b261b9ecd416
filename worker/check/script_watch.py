"""Watches the first steps of a script under `ps-worker --check`, in the worker's process, and reports facts.

ps-worker compares the facts of its workers (worker/check/findings.py).

Rules
- Each fact is an event "check", sent at once. So the launcher knows the earlier facts of a worker that hangs or fails.
- After STEPS steps the next step ends the script by a SystemExit: `finally` blocks run, `except Exception` does not
  catch it.
- Only the worker's process is watched. Processes that are forked from the one that has imported torch, such as a
  server's shards, and processes that a worker forks have the hooks too; there the hooks do nothing.
- Torch's hooks also see optimizers that DistributedOptimizer does not wrap, so a script without it is reported too.
- torch.autograd.backward and DataLoader.__iter__ are replaced until the check ends, to see losses and shuffled
  datasets.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, RandomSampler

from narrows.compression import ErrorFeedback, ladder, rows
from narrows.worker.model.embedding import Embedding
from narrows.worker.model.flat import FlatModel, FloatArray, fingerprint
from narrows.worker.model.optimizers import each_of
from narrows.worker.runtime.child_process import is_child
from narrows.worker.runtime.config import take
from narrows.worker.sync.embedding_tables import EmbeddingTables

STEPS = 2  # steps that are watched
BESIDE_MAX = 100  # steps of other optimizers after which the script ends, though the wrapper has made too few
HEAD = 4096  # the largest number of values of each gradient that are compared
SAMPLE = 1 << 24  # the largest number of values of an update that are encoded; costs are scaled to the model's size
STAND_IN = 4  # rows and columns of the parameter of a stand-in
ENCODED = 3  # how often an update is encoded; the fastest time counts

Tell = Callable[..., None]


class CheckedScript(SystemExit):
    """Ends the script, because the check has all facts."""


class ScriptWatch:
    """Watches this process. `tell(event, **values)` sends a fact to ps-worker.

    An update is encoded with `specs`. In a process that is forked later, those that its own environment names count.
    """

    def __init__(self, specs: list[str], tell: Tell) -> None:
        self.specs, self.tell = specs, tell
        self.process = os.getpid(), True  # the watched pid, and whether it is a worker's
        self.wrapper: torch.optim.Optimizer | None = None
        self.model = torch.nn.Module()
        self.parts: tuple[torch.optim.Optimizer, ...] = ()  # the wrapped optimizers
        self.steps = self.beside = 0
        self.within = False  # inside a step of the wrapper
        self.finished = False
        self.known: dict[int, torch.Tensor] = {}  # parameters of the model when it was wrapped
        self.absent: set[str] = set()  # parameters that have had no gradient yet
        self.before: FloatArray | None = None  # the weights before the first step
        self.lost_s = 0.0  # seconds that the check itself took since the last step
        self.loss: float | None = None  # the first loss since the last step that is not finite
        self.rows: list[tuple[int, Any]] = []  # by table: the number of rows, and the row indices of the newest step
        self.follows = set[str]()  # the parts of the script that follow the run (session.follows)
        self.forward = WatchedForward()
        self.replaced = torch.autograd.backward, DataLoader.__iter__
        torch.autograd.backward = self._backward
        DataLoader.__iter__ = lambda loader: self._iterates(loader)  # type: ignore[method-assign]
        self.hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        torch.autograd.backward, DataLoader.__iter__ = self.replaced  # type: ignore[method-assign]
        for hook in self.hooks:
            hook.remove()

    @staticmethod
    def of_environment(tell: Tell) -> ScriptWatch | None:
        specs = take("watch")
        return ScriptWatch([*specs], tell) if specs and not is_child() else None

    @property
    def here(self) -> bool:
        """Whether this process is watched: the environment of each forked worker has the variable."""
        if self.process[0] != os.getpid():
            self.specs = [*take("watch")]
            self.process = os.getpid(), bool(self.specs) and not is_child()
        return self.process[1]

    def _report(self, what: str, **values: Any) -> None:
        self.tell("check", what=what, **values)

    def begins(self, wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Begin with a DistributedOptimizer that is being made and has not joined yet."""
        if not self.here:
            return
        self.wrapper, self.model, self.parts = wrapper, model, each_of(inner)
        tables = [module for module in model.modules() if isinstance(module, Embedding)]
        apart = {id(module.weight) for module in tables}  # table weights: their gradients are of rows alone
        owned = {id(p) for group in inner.param_groups for p in group["params"]}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in apart}
        self.absent = {name for name, p in trained.items() if id(p) in owned}
        self.known = {id(p): p for p in model.parameters()}  # keeps the parameters alive: no other gets their id
        self._report(
            "model",
            trainable=sum(p.numel() for p in trained.values()),
            tensors=len(trained),
            tables=[len(tables), sum(module.num_embeddings for module in tables)],
            frozen_values=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            unowned=[name for name, p in trained.items() if id(p) not in owned],
            buffers=[sum(1 for _ in model.buffers()), sum(b.numel() * b.element_size() for b in model.buffers())],
            optimizers=[[type(each).__name__, _size(each)] for each in self.parts],
        )
        self.forward.watch(model)

    # Steps.

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], values: dict[str, Any]) -> Any:
        if not self.here:
            return None
        if self.finished:
            raise CheckedScript(0)
        engine = getattr(self.wrapper, "_engine", None)
        if optimizer is not self.wrapper:
            if not self.within and (
                self.wrapper is None or engine is not None
            ):  # else the engine, which is being made, tries the optimizer
                self._beside(optimizer)
            return None
        began, self.within = time.perf_counter(), True
        if self.before is None and engine is not None:
            self.before = _sample(engine.flat)
        seen = self.forward.close()
        closure = args[1] if len(args) > 1 else values.get("closure")
        self._report("step", number=self.steps + 1, **seen, **({} if closure else self._gradients()))
        self.lost_s += time.perf_counter() - began
        return ((optimizer, self._seeing(closure)), {}) if closure else None

    def _seeing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the closure of a step. The gradients exist once the closure has been called; then report them."""

        def seeing() -> Any:
            loss, began = closure(), time.perf_counter()
            self._report("gradients", **self.forward.close(), **self._gradients(loss))
            self.lost_s += time.perf_counter() - began
            return loss

        return seeing

    def _backward(self, tensors: Any, *args: Any, **values: Any) -> None:
        """Replace torch.autograd.backward, which each loss.backward() calls: note a loss that is not finite."""
        for loss in () if not self.here else (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            if self.loss is None and loss.numel() == 1 and not torch.isfinite(loss.detach()).all():
                self.loss = loss.item()
        self.replaced[0](tensors, *args, **values)

    def _iterates(self, loader: DataLoader[Any]) -> Any:
        """Replace DataLoader.__iter__: report a dataset that is shuffled whole, with its first sample's fingerprint."""
        if self.here and type(loader.sampler) is RandomSampler and torch.is_grad_enabled() and not self.steps:
            began, generator = time.perf_counter(), torch.get_rng_state()
            try:
                first = fingerprint(tree_leaves(loader.dataset[0]))
            except Exception:  # an error of the script's dataset: the loader raises it next
                first = ""
            torch.set_rng_state(generator)
            self._report("shuffled", samples=len(loader.sampler), first=first)
            self.lost_s += time.perf_counter() - began
        return self.replaced[1](loader)

    def _not_finite(self, gradient: str, loss: float | None) -> None:
        self._report("not finite", number=self.steps + 1, gradient=gradient, loss=loss)
        self.finished = True
        raise CheckedScript(0)

    def _gradients(self, loss: Any = None) -> dict[str, Any]:
        """Return facts of the present gradients.

        Raises:
            CheckedScript: a gradient or the loss is not finite.
        """
        heads, shown = list[torch.Tensor](), self.loss if loss is None else float(loss)
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            self.absent.discard(name)
            values = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            if not torch.isfinite(values).all():
                self._not_finite(name, shown)
            heads.append(values.detach().reshape(-1)[:HEAD])
        if shown is not None and not math.isfinite(shown):
            self._not_finite("", shown)
        engine = getattr(self.wrapper, "_engine", None)
        self.rows = engine.tables.pending() if engine is not None else []
        some = not self.steps and any(bool(head.any()) for head in heads)
        return {"gradients": fingerprint(heads) if some else ""}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self.wrapper or not self.here:
            return
        self.within, self.steps = False, self.steps + 1
        if self.steps == STEPS:
            self.finished = True
            touched = sum(len(numbers) for _, numbers in self.rows)
            named = self.model.named_parameters()
            late = [name for name, p in named if p.requires_grad and id(p) not in self.known]
            done = {"without": sorted(self.absent), "late": late, "lost_seconds": self.lost_s, "touched": touched}
            done |= {"follows": sorted(self.follows), "scheduled": self._scheduled()}
            done |= {"kept_values": sum(map(_kept, self.parts)), "rounded": self._rounded()}
            done["ways"] = sorted(set(engine.link.ways)) if (engine := getattr(self.wrapper, "_engine", None)) else []
            self._report("done", encoded=self._encoded(), **done)
            raise CheckedScript(0)
        self.lost_s, self.loss = 0.0, None

    def _rounded(self) -> bool:
        """Return whether a parameter of the run is not float32."""
        engine = getattr(self.wrapper, "_engine", None)
        return engine is not None and any(p.dtype != torch.float32 for p in engine.flat.parameters)

    def _scheduled(self) -> bool:
        """Return whether a torch scheduler was made on an optimizer of the run: a scheduler wraps step()."""
        every = [self.wrapper, getattr(self.wrapper, "inner", None), *self.parts]
        return any(hasattr(getattr(each, "step", None), "_wrapped_by_lr_sched") for each in every)

    def _beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step of an optimizer that DistributedOptimizer has not taken."""
        wrapped = any(optimizer is part for part in self.parts)
        self.beside += 1
        self._report("beside", optimizer=type(optimizer).__name__, wrapped=wrapped)
        if self.beside > (STEPS if wrapped or self.wrapper is None else BESIDE_MAX):
            self.finished = True
            raise CheckedScript(0)

    def _encoded(self) -> dict[str, list[float]]:
        """Return, by SPEC, the bytes of an update of this model and the seconds for encoding it."""
        engine = getattr(self.wrapper, "_engine", None)
        if engine is None or self.before is None:
            return {}
        update = _sample(engine.flat) - self.before
        times = engine.flat.size / update.size
        costs = dict[str, list[float]]()
        for spec in self.specs:
            codec = ladder(spec)
            coder, seconds, payload = ErrorFeedback(codec.compressor(), update.size), list[float](), memoryview(b"")
            for _ in range(ENCODED):
                began = time.perf_counter()
                payload = coder.encode(update)
                seconds.append(time.perf_counter() - began)
            costs[spec] = [
                len(payload) * times + self._row_bytes(engine.tables, codec.row_coding),
                min(seconds) * times,
            ]
        return costs

    def _row_bytes(self, tables: EmbeddingTables, coding: int) -> int:
        """Return the bytes of the embedding rows of a step. `coding`: a key of rows.CODINGS."""
        return sum(
            len(rows.encode(i, count, numbers.astype(np.uint32), np.zeros((len(numbers), tables.specs[i].dim), np.float32),
                            coding))
            for i, (count, numbers) in enumerate(self.rows) if len(numbers)
        )  # fmt: skip


class WatchedForward:
    """The inputs of the outermost forward passes, with gradients, of a model or of parts of it, up to a step."""

    def __init__(self) -> None:
        self.depth = 0
        self.inputs = list[str]()
        self.random = ""  # fingerprint of the generators' states before the first forward pass
        self.drew = False  # a forward pass drew random numbers
        self.hooks = list[Any]()

    def watch(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            self.hooks.append(module.register_forward_pre_hook(self._enters, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._leaves, always_call=True))

    def close(self) -> dict[str, Any]:
        """Remove the hooks, and return the facts of the passes so far. Later steps are timed, so not watched."""
        if not self.inputs:
            return {}
        for hook in self.hooks:
            hook.remove()
        seen = {"inputs": self.inputs, "random": self.random if self.drew else ""}
        self.inputs = []
        return seen

    def _enters(self, module: torch.nn.Module, args: Any, values: Any) -> None:
        self.depth += 1
        if self.depth > 1 or not torch.is_grad_enabled():
            return
        self.random = self.random or _generators()
        self.inputs.append(fingerprint(tree_leaves((args, values))))

    def _leaves(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self.depth -= 1
        if not self.depth and self.random:
            self.drew = self.drew or _generators() != self.random


def _generators() -> str:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return fingerprint(states)


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def _kept(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of values that an optimizer keeps, without those of its counters.

    Where the servers step it has no state here. Then a stand-in with the hyper-parameters of each group takes a step.
    """
    if optimizer.state:
        return _state_values(optimizer)
    sizes = [(group, sum(p.numel() for p in group["params"])) for group in optimizer.param_groups]
    return sum(size * _kept_by_stand_in(type(optimizer), group) // STAND_IN**2 for group, size in sizes)


def _state_values(optimizer: torch.optim.Optimizer) -> int:
    each = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.numel() for value in each if isinstance(value, torch.Tensor) and value.ndim)


def _kept_by_stand_in(kind: Any, group: dict[str, Any]) -> int:
    """Return the number of values that an optimizer keeps of a parameter of shape (STAND_IN, STAND_IN)."""
    stand_in = torch.ones(STAND_IN, STAND_IN, requires_grad=True)
    stand_in.grad = torch.ones_like(stand_in)
    known = inspect.signature(kind.__init__).parameters
    with contextlib.suppress(Exception):  # a class of the script's own may want anything
        made = kind([stand_in], **{name: value for name, value in group.items() if name in known and name != "params"})
        getattr(kind.step, "__wrapped__", kind.step)(made)  # without the hooks, which watch the script's optimizers
        return _state_values(made)
    return 0


def _sample(flat: FlatModel) -> FloatArray:
    """Return a copy of the first weights, at most SAMPLE values."""
    out = np.empty(min(flat.size, SAMPLE), np.float32)
    flat.read_keys(flat.begin, out)
    return out
