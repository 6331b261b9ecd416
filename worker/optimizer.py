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
    "parameters in the same order, or set the values of the present ones"
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap a torch optimizer, so that each step is shared with the other workers of the run.

    The wrapper shares param_groups, state and defaults with `inner` by reference, so schedulers, gradient accumulation,
    clipping and AMP work on the wrapper as on any optimizer. In a script that is run as plain python the wrapper does
    what `inner` does.

    Several optimizers, as in DistributedOptimizer([muon, adamw], model), step one after the other. param_groups then
    has the groups of all of them, and a scheduler may be made on the wrapper or on any of them. A mode that pushes
    updates takes any mix of optimizers. In a mode that pushes gradients the servers rebuild them: each must be an
    elementwise class of torch.optim, or, with --cut tensors, Muon, LAMB or LARS.

    Args:
        inner: the optimizer that steps the parameters of `model`, or a list or container of optimizers, each with its
            own parameters.
        model: the module that is trained. The worker declares its parameters to the server when it joins.
        overlap: gradients leave during the last backward pass of a step, in modes that push gradients. The script must
            then leave p.grad untouched until step(). Behind a barrier step() returns while the new state is on its way, and
            a parameter waits for its values at its first use. (Pushed updates hide the link behind the next forward and
            backward pass anyway.)
        accumulate: the number of backward passes that make a step. Only `overlap` reads it.
        max_grad_norm: the L2 norm to which all gradients together are clipped. Where gradients are pushed the server
            clips the folded mean, as DDP does; else each worker clips its own gradients.
        schedule: a new learning rate scheduler of `inner`, or a container of several, that the script steps once per
            optimizer step. The constructor advances it to the step that the run has reached. `step()` adds the steps that
            the run has made without this worker: a round closed without it (--quorum), or another worker made more
            steps in a round (--local-seconds).

    Raises:
        UsageError: this mode cannot push these parameters, or cannot use this optimizer.
        IncompatibleError: the model is not the model of the run.
    """

    _session: session.Session

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
        self._trains: bool | None = None  # the inner optimizer's newest call: train(), eval(), or None of the two
        self._ended = (
            False  # the newest step was the run's last (`steps=` of a loader), so the module shows the shared model
        )
        self.max_grad_norm = max_grad_norm
        if session.watch is not None:
            session.watch.begins(self, self.inner, model)
        self._session = session.of_new_training()
        if isinstance(self._session, session.LocalSession):
            session.tell_alone(model)
        if isinstance(self._session, session.RunSession):
            self._engine = self._session.attach(model, self.inner, max_grad_norm or 0.0, accumulate if overlap else 0)
        self._schedule = None if isinstance(self._session, WorkerOfChild) else schedule
        if self._schedule is not None:
            catch_up(self._schedule, self._session.step_count)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that `inner` has now. Loading a state replaces the list in `inner`."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the groups of `inner`. Raises UsageError if, in a run, the groups have other parameters than before."""
        if self._building:  # torch's constructor assigns an empty list
            return
        given, known = ([[id(p) for p in group["params"]] for group in each] for each in (groups, self.param_groups))
        if self._engine is not None and given != known:
            raise UsageError(OTHER_GROUPS)
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of `inner` now, by parameter.

        Where gradients are pushed the servers hold the optimizer's state. This mapping is then empty and read-only, and
        `state_dict(servers=True)` pulls the state from the servers.
        """
        return ON_SERVERS if self._on_servers else self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """Set the state of `inner`. Raises UsageError if no optimizer of this process would step with that state."""
        if self._building:
            return
        if self._on_servers or isinstance(self.inner, CombinedOptimizer):
            raise UsageError(
                "optimizer.state = ...: use load_state_dict(), or set that of the optimizer that was wrapped"
            )
        self.inner.state = state

    @property
    def _on_servers(self) -> bool:
        """True if the servers step the parameters: in a mode that pushes gradients."""
        return self._engine is not None and isinstance(self._engine.sync, GradientStep)

    @property
    def clock(self) -> int:
        """The run's clock, as `narrows.worker.clock()`."""
        return self._session.clock

    @property
    def staleness(self) -> int:
        """Clocks between this worker and the state that its newest step was computed on; 0 without a run."""
        return self._engine.sync.staleness if self._engine is not None else 0

    @property
    def bytes_up(self) -> int:
        """Bytes that this worker has sent so far, all frames of each message counted; 0 without a run."""
        return self._session.link.bytes_up if self._session.link is not None else 0

    @property
    def bytes_down(self) -> int:
        """Bytes that this worker has received so far, all frames of each message counted; 0 without a run."""
        return self._session.link.bytes_down if self._session.link is not None else 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the run.

        After the last of the `steps=` that `sampler` or `resumable` was given, the module shows the shared model, as
        after eval(). A further step() puts the worker's own parameters back first.

        Args:
            closure: evaluates the model and does the backward pass, as torch's closures do. Where gradients are pushed,
                or with several optimizers, it is called once a step, and all optimizers step along its gradients. Else
                the inner optimizer calls it as often as it does alone.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            UsageError: after finish(), or while the shared model is shown.
            NarrowsError: the server is lost, a wait exceeds its limit, or an update is not finite.
        """
        if self._ended:  # the script goes on past the last step
            self.train()
        before = self._session.step_count
        loss = self._step(closure)
        missed = self._session.step_count - before - 1  # steps that the run has made without this worker
        if self._schedule is not None and missed > 0:
            catch_up(self._schedule, missed)
        self._ended = 0 < self._session.steps <= self._session.step_count
        if self._ended:
            self.eval()
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # a GradScaler sets these
        ours, engine = self._session, self._engine
        if isinstance(ours, WorkerOfChild):
            raise NotAWorkerError("step()")
        if isinstance(ours, session.LocalSession) or engine is None:
            loss = None
            if overflow is None or not overflow:
                if scale is not None:
                    unscale([p.grad for p in parameters if p.grad is not None], scale)
                loss = clipped_step(self.inner, parameters, self.max_grad_norm or 0.0, closure)
            ours.stepped()
            return loss
        apart = engine.tables.weights
        if sum(p.requires_grad and id(p) not in apart for p in parameters) > len(engine.flat.parameters):
            raise UsageError(
                "a parameter that was frozen when the run began now requires a gradient, and no other worker has it: "
                "freeze parameters after DistributedOptimizer was made, not before"
            )
        engine.skips.scaled(scale, overflow)
        loss = engine.step(closure)
        for each in each_of(self.inner):
            each._opt_called = True  # type: ignore[attr-defined]  # for a scheduler made of it, if a server has stepped
        ours.stepped()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: GradScaler.step reads this, and then calls step() also if gradients have overflowed.

        step() has to be called then, because the clock of a skipped step must close too. Lightning also reads this, and
        refuses to clip if it is True. So Lightning reads False, and unscales the gradients before it clips them.
        """
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
        """Reset the gradients of all parameters, and those of embedding rows, which no optimizer has."""
        super().zero_grad(set_to_none)
        if self._engine is not None:
            self._engine.tables.drop()

    def step_samples(self, samples: int) -> None:
        """Weight the next push in the mean over workers by the number of samples of this step (default 1).

        Args:
            samples: samples that this step's gradients were computed on, at least 1. Calls before one push add up.
        """
        if samples < 1:
            raise UsageError(f"step_samples({samples}): give a positive number")
        if self._engine is not None:
            self._engine.weigh(samples)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to `inner`. Raises UsageError in a run: each worker declared its parameters when it joined."""
        if self._engine is not None:
            raise UsageError(
                "add_param_group after the run has begun: pass every group to the optimizer before wrapping it"
            )
        if not self._building:  # torch's constructor adds the groups that `inner` has already
            self.inner.add_param_group(param_group)

    def state_dict(self, *, residual: bool = False, servers: bool = False) -> dict[str, Any]:
        """Return the state of the inner optimizer; of several optimizers, their states as a list under "optimizers".

        In a group every process calls this method, and each gets the state of whole tensors. Save the model beside this
        state inside `shared()`: outside, the parameters of the model already include this worker's residual.

        Args:
            residual: add the residual, which is what this worker has yet to send. Under "narrows" the dict then has
                "clock" and "residual": a float32 tensor with one value for each parameter of the model, or None in a
                mode that keeps nothing back. A run that is resumed without the residual loses that part of its newest
                updates.
            servers: where gradients are pushed, the servers hold the optimizer's state and "state" is empty here. True
                pulls the state from the servers: 4 bytes for each parameter and moment. A script without Narrows can
                load it, as the state of `inner` after as many steps. Under "narrows" the dict then has the clock of the
                state. In modes with a barrier the whole state is of one clock; under async its parts may be of several.

        Returns:
            A dict as torch.optim.Optimizer.state_dict() returns it.
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
                each[
                    "state"
                ] = {}  # the servers step: a state that Adagrad began with, or that was loaded here, is not used
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
        """Load a state into the inner optimizer, and the residual if the state has one.

        The clock stays that of the run, not that of the file. With --dp-noise the residual is ignored, because the run
        that saved it may have had no noise. Where gradients are pushed the servers' optimizer state counts, and the
        loaded state is not used.

        Args:
            state_dict: what state_dict() returned. It is not changed.

        Raises:
            UsageError: the residual is of a model of another size.
        """
        if self._engine is not None:
            self._engine.meet("load_state_dict()")
            self._engine.settle()
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
        """End this worker's training: send the residual, wait until all workers have done their last step, and leave.

        The module then holds the model that all workers end with, the same as in model.safetensors. Under gossip that
        model is the mean of the models of the workers that call finish(). finish() does not wait for workers that die
        or that call leave(). At exit of the script finish() is called automatically.
        """
        self._end(last=True)

    def leave(self) -> None:
        """End this worker's training now: send the residual, and leave without waiting for other workers to end.

        The updates of this worker stay in the run. The module then holds the shared model of that moment; under gossip,
        the model of this worker.
        """
        self._end(last=False)

    def _end(self, last: bool) -> None:
        if self._trains is False:
            self.train()
        if self._engine is not None:
            self._engine.finish(last)

    def eval(self) -> None:
        """Show the shared model in the module until `train()`: the server's parameters and the run's module buffers.

        The call waits until the server has folded this worker's pushes. If the inner optimizer has an `eval()`, as
        schedule-free optimizers do, the wrapper calls it once, after the shared parameters are in the module. In a
        group the wrapper does not call it, since each process's optimizer has a slice.
        """
        if self._engine is not None:
            self._engine.shared.show()
        self._tell_inner(trains=False)

    def train(self, mode: bool = True) -> None:
        """Put this worker's own parameters and buffers back into the module, as step() needs them.

        If they are in the module already, nothing happens. If the inner optimizer has a `train()`, the wrapper calls it
        once.

        Args:
            mode: False does what eval() does.
        """
        if not mode:
            self.eval()
            return
        self._tell_inner(trains=True)
        if self._engine is not None:
            self._engine.shared.put_back()

    def _tell_inner(self, trains: bool) -> None:
        """Call train() or eval() of the inner optimizers: schedule-free ones (2405.15682) change parameters."""
        if self._trains is trains or (self._engine is not None and self._engine.slice is not None):
            return
        self._trains = trains
        for each in each_of(self.inner):
            getattr(each, "train" if trains else "eval", lambda: None)()
        if self._engine is not None:
            self._engine.flat.written()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context that shows the shared model, in which to evaluate and save.

        It calls `eval()` on entry. On exit it calls `train()`, unless the shared model was shown before the context.
        """
        shown = self._trains is False or (self._engine is not None and self._engine.shared.kept is not None)
        self.eval()
        try:
            yield
        finally:
            self.train(not shown)


def begin_anew(optimizer: DistributedOptimizer) -> None:
    """Count the steps of `optimizer` from 0 again, as when a Trainer trains a second time.

    Only a script without a run counts anew. In a run the next step is the next step of the run.
    """
    if isinstance(optimizer._session, session.LocalSession):
        optimizer._session = session.of_new_training()
