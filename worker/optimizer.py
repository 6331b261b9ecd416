"""DistributedOptimizer: a torch optimizer whose step is shared with the other workers of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from narrows.protocols.errors import UsageError
from narrows.worker import session
from narrows.worker.checkpoint.server_state import ON_SERVERS, as_state_dict
from narrows.worker.model.not_finite import unscale
from narrows.worker.model.optimizers import CombinedOptimizer, as_one, each_of
from narrows.worker.runtime.child_process import NotAWorkerError, WorkerOfChild
from narrows.worker.schedules import ScheduleCatchUp, catch_up
from narrows.worker.sync.engine import Engine
from narrows.worker.sync.gradients import GradientStep
from narrows.worker.sync.updates import clipped_step

OTHER_GROUPS = (
    "param_groups = ...: every worker declared its parameters and their groups when it joined: give groups of the same "
    "parameters in the same order, or set the values of those that are there"
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `inner`, which steps the parameters of `model`: one optimizer, or a list or container of them, each with its own
    parameters.

    It shares param_groups, state and defaults with `inner` by reference, so schedulers, gradient accumulation, clipping and
    AMP work on it as on any optimizer. Run as plain python it does what `inner` does.

    Several, as in DistributedOptimizer([muon, adamw], model), step one after the other. param_groups has the groups of all,
    and a scheduler may be made on the wrapper or on any of them. Where updates are pushed any mix goes. Where gradients are
    pushed the server rebuilds one elementwise class, so all must be of it.

    overlap: let gradients leave during the last of the `accumulate` backward passes of a step (modes that push gradients;
    pushed updates hide the link behind the next forward and backward anyway). p.grad must then stay untouched until step().
    closure: where gradients are pushed, or for several optimizers, it is called once a step and all step along its
    gradients; else the inner optimizer calls it as often as it does alone.
    max_grad_norm: L2 norm to clip all gradients to: of the folded mean where gradients are pushed (as DDP clips), else of the
    worker's own.
    schedule: a new scheduler of `inner`, or a container of some, that steps once a step. It is brought to where the run is.
    Raises UsageError for what cannot be pushed, IncompatibleError where the model is not the run's.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        model: torch.nn.Module,
        *,
        overlap: bool = False,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        schedule: ScheduleCatchUp | None = None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: give the number of backward passes that make a step")
        self._engine: Engine | None = None
        self.inner = as_one(inner, model)
        self._building = True
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._building = False
        self._trains: bool | None = None  # of train() and eval(), what the inner optimizer was told last
        self._ended = False  # the newest step was the last that a loader counts, so the shared model is shown
        self.max_grad_norm = max_grad_norm
        if session.watch is not None:
            session.watch.begins(self, self.inner, model)
        self._session = session.of_new_training()
        if isinstance(self._session, session.LocalSession):
            session.tell_alone(model)
        if isinstance(self._session, session.RunSession):
            self._engine = self._session.attach(model, self.inner, max_grad_norm or 0.0, accumulate if overlap else 0)
        if schedule is not None and not isinstance(self._session, WorkerOfChild):
            catch_up(schedule, self._session.step_count)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those that `inner` has at the moment: where a state is loaded it has others."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """`inner` gets them. Raises UsageError in a run for groups of other parameters."""
        if self._building:  # the constructor of torch sets none
            return
        given, known = ([[id(p) for p in group["params"]] for group in each] for each in (groups, self.param_groups))
        if self._engine is not None and given != known:
            raise UsageError(OTHER_GROUPS)
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """That of `inner` at the moment, by parameter. Where gradients are pushed the servers have the optimizer's state, and
        this is empty and read-only: `state_dict(servers=True)` pulls it."""
        return ON_SERVERS if self._on_servers else self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """`inner` gets it. Raises UsageError where nothing would step with it."""
        if self._building:
            return
        if self._on_servers or isinstance(self.inner, CombinedOptimizer):
            raise UsageError(
                "optimizer.state = ...: use load_state_dict(), or set that of the optimizer that was wrapped"
            )
        self.inner.state = state

    @property
    def _on_servers(self) -> bool:
        """The servers step the parameters."""
        return self._engine is not None and isinstance(self._engine.sync, GradientStep)

    @property
    def clock(self) -> int:
        """The run's clock, as `narrows.worker.clock()`."""
        return self._session.clock

    @property
    def staleness(self) -> int:
        """Clocks that the newest step was ahead of the state that it was computed on; 0 alone."""
        return self._engine.sync.staleness if self._engine is not None else 0

    @property
    def bytes_up(self) -> int:
        """Bytes of whole messages that this worker has sent so far."""
        return self._session.link.bytes_up if self._session.link is not None else 0

    @property
    def bytes_down(self) -> int:
        """Bytes of whole messages that this worker has got so far."""
        return self._session.link.bytes_down if self._session.link is not None else 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the run: returns the closure's loss, if one is given. After the last of the `steps=` that `sampler` or
        `resumable` was given, the module shows the shared model, as after eval()."""
        if self._ended:  # this loop goes on
            self.train()
        loss = self._step(closure)
        self._ended = 0 < self._session.steps <= self._session.step_count
        if self._ended:
            self.eval()
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        if self._engine is None:
            if isinstance(self._session, WorkerOfChild):
                raise NotAWorkerError("step()")
            loss = None
            if overflow is None or not overflow:
                if scale is not None:
                    unscale([p.grad for p in parameters if p.grad is not None], scale)
                loss = clipped_step(self.inner, parameters, self.max_grad_norm or 0.0, closure)
            assert isinstance(self._session, session.LocalSession)
            self._session.stepped()
            return loss
        apart = self._engine.tables.weights
        if sum(p.requires_grad and id(p) not in apart for p in parameters) > len(self._engine.flat.parameters):
            raise UsageError(
                "a parameter that was frozen when the run began now requires a gradient, and no other worker has it: "
                "freeze parameters after DistributedOptimizer was made, not before"
            )
        self._engine.skips.scaled(scale, overflow)
        loss = self._engine.step(closure)
        for each in each_of(self.inner):
            each._opt_called = True  # type: ignore[attr-defined]  # for a scheduler that was made of it, if a server has stepped
        assert isinstance(self._session, session.RunSession)
        self._session.stepped()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step asks for it. So step() is called where gradients have overflowed as well: the clock of a step that is
        left out is closed. Lightning asks too, and refuses to clip then; it is told no, and unscales before it clips."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning.")):
            return False
        if self._engine is not None and self._engine.overlaps:
            raise UsageError(
                "a GradScaler changes gradients between backward() and step(), but with overlap=True they have left "
                "already: leave out overlap=True, or train in bfloat16, which needs no scaler"
            )
        if self._engine is not None and self._engine.tables.specs:
            raise UsageError(
                "a GradScaler does not find the gradients of an embedding table on the servers: train in bfloat16, which "
                "needs no scaler"
            )
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Rows of embedding tables are parameters of no optimizer, but their gradients go too."""
        super().zero_grad(set_to_none)
        if self._engine is not None:
            self._engine.tables.drop()

    def step_samples(self, samples: int) -> None:
        """Weight of the next push among the workers': the samples it was computed on (default 1)."""
        if samples < 1:
            raise UsageError(f"step_samples({samples}): give a positive number")
        if self._engine is not None:
            self._engine.weigh(samples)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused in a run: every worker declared its parameters when it joined."""
        if self._engine is not None:
            raise UsageError(
                "add_param_group after the run has begun: pass every group to the optimizer before wrapping it"
            )
        if not self._building:  # else the constructor of torch adds what `inner` has
            self.inner.add_param_group(param_group)

    def state_dict(self, *, residual: bool = False, servers: bool = False) -> dict[str, Any]:
        """The inner optimizer's state. Several optimizers have theirs in a list, under "optimizers".

        residual: add, under "narrows", the clock and what this worker has yet to send: float32[parameters], or None where
        nothing ever is. It is as large as the model. A run that goes on without it has lost that much of its newest updates.

        servers: where gradients are pushed, the servers have the optimizer's state, and here it is empty. Pull it from them:
        4 bytes for each parameter and moment. A script without Narrows loads it, as that of `inner` after as many steps. Under
        "narrows" is the clock that it is of. Behind a barrier all of it is of one clock; under async the parts are not.

        In a group every process calls it, and each has the state of whole tensors.
        Save the model beside it inside `shared()`: outside, its parameters hold this worker's residual already.
        """
        if self._engine is not None:
            self._engine.meet("state_dict()")
        cut = self._engine.slice if self._engine is not None else None
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with cut.whole_state() if cut is not None else nullcontext():
            state = self.inner.state_dict()
        if self._engine is not None and isinstance(self._engine.sync, GradientStep):
            for each in state.get("optimizers", [state]):
                each["state"] = {}  # what an optimizer began with, as Adagrad does, or has loaded is not what steps
            if servers:
                clock, states = self._engine.sync.servers.read()
                state = as_state_dict(self.inner, states) | {"narrows": {"clock": clock}}
        if residual and self._engine is not None:
            left = self._engine.sync.residual()
            state["narrows"] = {
                "clock": self._engine.sync.clock,
                "residual": None if left is None else torch.from_numpy(left),
            }
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, state)
            state = state if found is None else found
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the inner state, and the residual where there is one; the clock is the run's, not the file's.

        With --dp-noise it takes no residual: the run that left it may have had no noise. Where gradients are pushed, the
        servers' state of the optimizer holds, and this one is not used.
        """
        if self._engine is not None:
            self._engine.meet("load_state_dict()")
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            found = before(self, state)
            state = state if found is None else dict(found)
        ours, engine = state.pop("narrows", None), self._engine
        self.inner.load_state_dict(state)
        left = ours.get("residual") if ours is not None else None
        if left is not None and engine is not None and not engine.hides:
            engine.load_residual(left.detach().cpu().numpy())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def finish(self) -> None:
        """End this worker's part: send what is left, wait until all workers have done their last step, and leave.

        The module then holds the model that all workers end with, which is that of model.safetensors. Under gossip it is the
        mean of the models of those that call finish(). At exit it is called for you. A worker that dies or that calls leave()
        is not waited for.
        """
        self._end(last=True)

    def leave(self) -> None:
        """End this worker's part at once: send what is left, and wait for no other worker to end.

        Its updates stay in the run. The module then holds the shared model as it is at that moment; under gossip, this worker's
        own.
        """
        self._end(last=False)

    def _end(self, last: bool) -> None:
        if self._trains is False:
            self.train()
        if self._engine is not None:
            self._engine.finish(last)

    def eval(self) -> None:
        """Show the shared model in the module until `train()`: the server's parameters, and the module buffers of the run.
        Waits until own pushes are folded. An inner optimizer that has an `eval()`, as schedule-free ones do, is told once: it
        finds the shared parameters beside its own state. In a group, whose optimizers have slices, none is told."""
        if self._engine is not None:
            self._engine.shared.show()
        self._tell_inner(trains=False)

    def train(self, mode: bool = True) -> None:
        """Put this worker's own parameters and buffers back. step() needs that; where they are there, nothing happens. An inner
        optimizer that has a `train()` is told once."""
        if not mode:
            self.eval()
            return
        self._tell_inner(trains=True)
        if self._engine is not None:
            self._engine.shared.put_back()

    def _tell_inner(self, trains: bool) -> None:
        """Schedule-free optimizers (2405.15682) change the parameters from one to the other."""
        if self._trains is trains or (self._engine is not None and self._engine.slice is not None):
            return
        self._trains = trains
        for each in each_of(self.inner):
            getattr(each, "train" if trains else "eval", lambda: None)()
        if self._engine is not None:
            self._engine.shared.changes.ours()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """`eval()`, and afterwards `train()` where the shared model was not shown before: evaluate and save inside."""
        shown = self._trains is False or (self._engine is not None and self._engine.shared.kept is not None)
        self.eval()
        try:
            yield
        finally:
            self.train(not shown)


def begin_anew(optimizer: DistributedOptimizer) -> None:
    """Alone: its next step is the first one of a training, as where a Trainer trains a second time. In a run it is the next one
    of the run."""
    if isinstance(optimizer._session, session.LocalSession):
        optimizer._session = session.of_new_training()
