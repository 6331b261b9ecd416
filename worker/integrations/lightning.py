"""Lightning's Trainer in a run: with NarrowsCallback the Trainer trains the run's model.

    from narrows.worker.lightning import NarrowsCallback, sampler
    trainer = lightning.Trainer(max_steps=600, callbacks=[NarrowsCallback()])

Rules
- The callback wraps the optimizer of configure_optimizers in a DistributedOptimizer, unless it is one.
- The Trainer's steps, epochs and schedules follow the run: a worker that joins late or rejoins goes on where the run
  is.
- Validation shows the shared model. All checkpoints hold the shared model. Only the first worker of a machine saves
  them.
- After fit() each worker of a machine knows the paths of the first worker's checkpoints, for ckpt_path="best".
- After fit() the module holds the model that all workers end with.
"""

from __future__ import annotations

import json
from typing import Any

import lightning
import torch

from narrows.protocols.errors import UsageError
from narrows.worker.data.datasets import sampler
from narrows.worker.optimizer import DistributedOptimizer, begin_anew
from narrows.worker.runtime.device import from_first, local_rank
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.schedules import catch_up
from narrows.worker.session import current, rank, step_count

__all__ = ["NarrowsCallback", "sampler"]

# Paths that a ModelCheckpoint keeps. Only the first worker of a machine saves, so the others take over its paths.
SAVED = ("dirpath", "best_model_path", "last_model_path", "kth_best_model_path")
UNKNOWN = (
    "the first worker of this machine did not say where its checkpoints are: call test(), validate() and predict() with "
    "ckpt_path in that one alone, if local_rank() == 0"
)
COUNTS = ("ready", "started", "processed", "completed")  # counters of Lightning's progress


def count(progress: Any, value: int) -> None:
    """Set those counters that a progress of Lightning has."""
    for name in COUNTS:
        if hasattr(progress, name):
            setattr(progress, name, value)


class NarrowsCallback(lightning.Callback):  # type: ignore[misc]
    """Give it to Lightning's Trainer in `callbacks`. `shared` is the DistributedOptimizer, once fit() has made it."""

    def __init__(self) -> None:
        self.shared: DistributedOptimizer | None = None
        self.fits = 0  # calls of fit() so far

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if trainer.ckpt_path and current().link is not None:
            raise UsageError(
                "ckpt_path: a run goes on from its server's checkpoints: start ps-serve, or a ps-worker that embeds it, with "
                "--resume, and leave it out"
            )
        if len(strategy.optimizers) != 1:
            raise UsageError(
                f"configure_optimizers returned {len(strategy.optimizers)} optimizers, and a run has one: return "
                "DistributedOptimizer([...], self), and step that in training_step"
            )
        (inner,) = strategy.optimizers
        self.shared = inner if isinstance(inner, DistributedOptimizer) else DistributedOptimizer(inner, pl_module)
        if self.shared is inner:  # a new one counts from step 0 anyway
            begin_anew(self.shared)
        strategy.optimizers = [self.shared]
        self._share_checkpoints(strategy, self.shared)
        self._count_steps(trainer)
        torch.manual_seed((torch.initial_seed() + rank()) % 2**63)  # else dropout is the same in all workers

    def _share_checkpoints(self, strategy: Any, shared: DistributedOptimizer) -> None:
        """Make the strategy return the shared model's state.

        Every save of Lightning asks the strategy for the module's state, but not every save calls the callbacks.
        """
        state_dict = strategy.lightning_module_state_dict

        def shared_state_dict() -> dict[str, Any]:
            with shared.shared():
                return {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in state_dict().items()
                }

        strategy.lightning_module_state_dict = shared_state_dict
        if local_rank():
            strategy.save_checkpoint = strategy.remove_checkpoint = lambda *args, **values: None

    def _count_steps(self, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        for progress in (
            loop.automatic_optimization.optim_progress.optimizer.step,
            loop.manual_optimization.optim_step_progress,
        ):
            count(progress.total, step_count())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the Trainer's epoch and schedules, since the number of steps of an epoch is known now."""
        loop, steps = trainer.fit_loop.epoch_loop, step_count()
        epoch_steps = max(
            1, -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
        )  # a stream has infinitely many batches
        epochs = int(steps // epoch_steps)
        for each in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
            count(each, epochs)
        count(loop.batch_progress.total, steps * trainer.accumulate_grad_batches)
        loop._batches_that_stepped = steps  # loggers use it as the step
        for config in trainer.lr_scheduler_configs:
            passed = steps if config.interval == "step" else epochs
            if not config.reduce_on_plateau:
                catch_up(config.scheduler, passed // config.frequency)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Advance the Trainer's counters if the run is ahead: after a rejoin, or after rounds that a quorum closed."""
        missed = step_count() - trainer.global_step
        if missed > 0 and trainer.lightning_module.automatic_optimization:
            self._count_steps(trainer)
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    catch_up(config.scheduler, missed // config.frequency)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and trainer._logger_connector.should_update_logs:
            total = {"total_steps": trainer.max_steps} if trainer.max_steps > 0 else {}
            current().record({"loss": float(loss), **total})
        if 0 < trainer.max_steps <= trainer.global_step:
            self._finish()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish after the last epoch, so that Lightning then saves the model that all workers end with."""
        if (
            trainer.max_epochs is not None
            and 0 < trainer.max_epochs <= trainer.fit_loop.epoch_progress.current.processed
        ):
            self._finish()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Make ckpt_path="best" and "last" name the files of this machine's first worker in each of its workers."""
        self.fits += 1
        if current().link is None or not trainer.checkpoint_callbacks:
            return
        mine = [
            {name: path for name in SAVED if isinstance(path := getattr(each, name, None), str)}
            for each in trainer.checkpoint_callbacks
        ]
        answer = from_first(f"lightning-{self.fits}", json.dumps(mine))
        if answer is None:
            say(UNKNOWN)
            return
        for each, paths in zip(trainer.checkpoint_callbacks, json.loads(answer), strict=False):
            for name in SAVED:
                if name in paths:
                    setattr(each, name, paths[name])

    def _finish(self) -> None:
        assert self.shared is not None
        self.shared.finish()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.shared is not None:
            self.shared.eval()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.shared is not None:
            self.shared.train()
