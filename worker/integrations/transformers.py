"""Hugging Face's Trainer in a run: `distributed(Trainer)` is a Trainer that trains the run's model.

    from narrows.worker.transformers import distributed
    trainer = distributed(Trainer)(model, args, train_dataset=data)

Rules
- The Trainer's optimizer, its own or the script's, is a DistributedOptimizer. Its data is this worker's share; a stream
  is cut as under DDP.
- The Trainer's steps and schedule follow the run: a worker that joins late or rejoins goes on where the run is.
- All checkpoints hold the shared model. Only the first worker of a machine saves them.
- After train() the module holds the model that all workers end with, or the best model if the Trainer has loaded it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainerCallback
from transformers.trainer_pt_utils import IterableDatasetShard

from narrows.protocols.errors import UsageError
from narrows.worker import session
from narrows.worker.data.datasets import RunSampler
from narrows.worker.integrations.trainer_teacher import DistillationOverrides
from narrows.worker.optimizer import DistributedOptimizer, begin_anew
from narrows.worker.runtime.device import from_first, local_rank
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.schedules import catch_up
from narrows.worker.session import current, rank, step_count, world_size

Base: Any = object
OF_FIRST = "the best checkpoint of the first worker of this machine"  # a placeholder until that worker has finished
UNKNOWN = (
    "load_best_model_at_end: the first worker of this machine did not say where its best checkpoint is, and the model is that "
    "which all workers ended with"
)
SHUFFLES = {"random": True, "sequential": False}  # sampling strategies of Trainer to `shuffle` of RunSampler


class TrainerSampler(RunSampler):
    """This worker's share of a Trainer's data. The share is empty once the run is over: the Trainer steps no more."""

    def __init__(self, trainer: Any, dataset: Any) -> None:
        """Cut the dataset as the Trainer's arguments say.

        Args:
            trainer: the Trainer; its args give batch, accumulation, order and seed.
            dataset: the data of all workers, with a length.

        Raises:
            UsageError: the Trainer would group samples by length.
        """
        args, self.trainer = trainer.args, trainer
        strategy = getattr(args, "train_sampling_strategy", "random")  # the name in transformers 5
        if strategy not in SHUFFLES or getattr(args, "group_by_length", False):
            raise UsageError(
                "Trainer groups samples by length, and the workers' shares are cut at random: set "
                "train_sampling_strategy='random' (group_by_length=False before transformers 5)"
            )
        batch = args.train_batch_size * args.gradient_accumulation_steps
        drop_last, seed = (
            args.dataloader_drop_last,
            args.data_seed or 0,
        )  # args.seed may differ between workers
        super().__init__(dataset, batch, drop_last=drop_last, shuffle=SHUFFLES[strategy], seed=seed)

    def __iter__(self) -> Iterator[int]:
        return iter(()) if 0 < self.trainer.state.max_steps <= step_count() else super().__iter__()


class TrainerStream(IterableDataset[Any]):
    """This worker's share of a streaming dataset. The share begins at the run's present batch.

    Trainer cuts the stream as under DDP: of each `batch * size` rows worker i has the i-th `batch`; the first rows fill
    up the last batch. If a Hugging Face dataset has at least one file for each worker, it is cut by files, and no
    worker reads the file of another. A dataset that is cut already stays as it is. `split_dataset_by_node` cuts a
    dataset, and so does a dataset that calls rank() or world_size() while it is read.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, size: int, seed: int) -> None:
        """Cut the stream.

        Args:
            dataset: the stream of all workers.
            batch: the rows of one micro-batch.
            rank: the index of this worker, in [0, size).
            size: the number of workers.
            seed: the seed of the stream's generator in epoch 0, the same in all workers.
        """
        self.cut = getattr(dataset, "_distributed", None) is not None
        if not self.cut and hasattr(dataset, "shard") and getattr(dataset, "num_shards", 0) >= size:
            dataset, self.cut = dataset.shard(num_shards=size, index=rank), True
        self.dataset, self.batch, self.rank, self.size, self.seed = dataset, batch, rank, size, seed
        self.begin(0, over=False)
        self.epoch = self.passed = 0  # the Trainer's epoch, and the run's epochs before the Trainer's first one

    def begin(self, used: int, over: bool) -> None:
        """Begin at the run's present batch.

        Args:
            used: batches of this share that the run has trained on before this Trainer; they are skipped.
            over: the run has taken all of its steps.
        """
        self.used, self.finished = used, over

    def __len__(self) -> int:
        """Return the rows of this share in an epoch. Raises TypeError if the dataset has no length."""
        rows = len(self.dataset)
        return rows if self.cut else -(-rows // (self.batch * self.size)) * self.batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        loader = get_worker_info()
        number, count = (loader.id, loader.num_workers) if loader is not None else (0, 1)
        passing = len(range(number, self.used, count)) * self.batch if not self.epoch else 0
        while not self.finished:
            empty = True
            for row in self._rows(self.epoch + self.passed):
                empty = False
                if passing:
                    passing -= 1
                else:
                    yield row
            if not passing or empty:
                return
            self.passed += 1

    def _rows(self, epoch: int) -> Iterable[Any]:
        """Return the rows of this share in one epoch."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(generator := getattr(self.dataset, "generator", None), torch.Generator):
            generator.manual_seed(self.seed + epoch)  # Trainer does the same
        before, each = session.shares_asked, iter(self.dataset)
        try:
            first = next(each)
        except StopIteration:
            return ()
        every = chain([first], each)
        if self.cut or session.shares_asked != before:
            return every
        ours: Iterable[Any] = IterableDatasetShard(every, self.batch, num_processes=self.size, process_index=self.rank)
        return ours


class TrainerProgress(TrainerCallback):  # type: ignore[misc]
    """Keeps the steps and the schedule of a Trainer at those of the run."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        state.global_step = step_count()
        if (stream := self.trainer.stream) is not None:
            used = state.global_step * args.gradient_accumulation_steps
            stream.begin(used, over=0 < state.max_steps <= state.global_step)
        # Attributes of Trainer: it logs the mean loss over the steps since.
        self.trainer._globalstep_last_logged = self.trainer._initial_global_step = state.global_step
        catch_up(self.trainer.lr_scheduler, state.global_step)
        torch.manual_seed((torch.initial_seed() + rank()) % 2**63)  # else dropout is the same in all workers

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Skip the steps that the run took without this Trainer.

        The run is ahead after this worker has rejoined, and after a quorum has closed rounds without this worker.
        """
        missed = step_count() - state.global_step
        state.global_step += missed
        catch_up(self.trainer.lr_scheduler, missed)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if control.should_training_stop:  # Trainer saves and evaluates next: the model must be the final one by then
            self.trainer.shared.finish()

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Record the loss. The Trainer itself logs to the script's loggers."""
        if "loss" in (logs or {}):
            current().record({"loss": float(logs["loss"]), "total_steps": state.max_steps})

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.trainer.shared.finish()
        state.best_model_checkpoint = state.best_model_checkpoint or self.trainer.best


class TrainerOverrides(Base):  # type: ignore[misc]
    """The methods that a Trainer overrides in a run.

    Attributes:
        shared: the DistributedOptimizer, once train() has made it.
        stream: the share of streaming data, if the data streams.
    """

    train_dataset: Any
    shared: DistributedOptimizer | None = None
    loads = 0  # the number of best models that this Trainer has loaded
    best: str | None = None  # the path of the newest of them
    stream: TrainerStream | None = None

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.add_callback(TrainerProgress(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **values: Any) -> Any:
        """Train.

        Raises:
            UsageError: resume_from_checkpoint is given in a run. A run resumes from the checkpoints of its server.
        """
        if current().link is None:
            made = self.shared if self.shared is not None else self.optimizer
            if isinstance(made, DistributedOptimizer):  # a new optimizer counts from step 0 anyway
                begin_anew(made)
        elif resume_from_checkpoint:
            raise UsageError(
                "resume_from_checkpoint: a run goes on from its server's checkpoints: start ps-serve, or a ps-worker that "
                "embeds it, with --resume, and leave it out"
            )
        return super().train(resume_from_checkpoint, *args, **values)

    def create_optimizer(self, *args: Any, **values: Any) -> Any:
        if self.shared is None:
            inner = super().create_optimizer(*args, **values)
            own = inner if isinstance(inner, DistributedOptimizer) else DistributedOptimizer(inner, self.model)
            self.shared = self.optimizer = own
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return TrainerSampler(self, dataset) if hasattr(dataset, "__len__") else super()._get_train_sampler(dataset)

    def get_train_dataloader(self) -> Any:
        whole: Any = self.train_dataset
        args = self.args
        if not isinstance(whole, IterableDataset) or current().link is None:
            return super().get_train_dataloader()
        size, batch = world_size(), args.train_batch_size
        self.stream = self.train_dataset = TrainerStream(whole, batch, rank() % size, size, args.data_seed or 0)
        if size > 1 and not self.stream.cut:
            say(f"the training data stream, and are cut for {size} workers: a script need not cut them")
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = whole

    def save_model(self, *args: Any, **values: Any) -> None:
        if local_rank():
            return
        if self.shared is None:
            super().save_model(*args, **values)
            return
        with self.shared.shared():
            super().save_model(*args, **values)

    def _load_best_model(self) -> None:
        """Finish the run, then load the best model.

        The Trainer loads it after training. The workers must not push the difference as an update, so the run is over
        first.
        """
        assert self.shared is not None
        self.shared.finish()
        self.loads += 1
        best = from_first(f"transformers-{self.loads}", str(self.state.best_model_checkpoint))
        if best is None:
            self.state.best_model_checkpoint = None
            say(UNKNOWN)
            return
        self.state.best_model_checkpoint = self.best = best
        super()._load_best_model()
        if local_rank():  # else this Trainer would delete checkpoints in the first worker's folder
            self.state.best_model_checkpoint = None

    def _save_checkpoint(self, *args: Any, **values: Any) -> None:
        if not local_rank():
            super()._save_checkpoint(*args, **values)
        elif self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = OF_FIRST  # Trainer loads a best model only if this is set


@cache
def distributed(trainer: type, teacher: float = 0.0) -> Any:
    """Return a Trainer class for the workers of a run.

    Args:
        trainer: transformers.Trainer, or a class that is derived from it.
        teacher: weight of the soft targets in the loss, from 0 to 1, where --teacher names a teacher; 0: none is asked.

    Returns:
        A subclass of `trainer` with the same name and arguments.

    Raises:
        UsageError: the weight is out of range.
    """
    if not 0 <= teacher <= 1:
        raise UsageError(f"distributed(Trainer, teacher={teacher:g}): give the soft targets a weight from 0 to 1")
    bases = (DistillationOverrides,) if teacher else ()
    own = {"__module__": trainer.__module__, "__doc__": trainer.__doc__, "teacher_weight": float(teacher)}
    return type(trainer.__name__, (*bases, TrainerOverrides, trainer), own)
