"""The place of this process in a plan: its stage, its replica, and the process group of its pipeline.

    from narrows.worker import DistributedOptimizer, pipeline, stage, stage_layers, stages

    group = pipeline()
    module = my_stage(stage_layers(24))
    optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), module)
    piece = PipelineStage(module, stage(), stages(), device, input_args=..., output_args=..., group=group)

ps-worker --plan gives each process its place, in environment variables. A script that is run as plain python is the
only stage of the only replica.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from functools import cache
from types import TracebackType

import torch
import torch.distributed as dist

from narrows.protocols.config.deployment import Deployment, StageEdge, StageServer, WorkerProcess
from narrows.protocols.errors import NarrowsError, StageLostError, UsageError
from narrows.protocols.runtime.cli import plan_file
from narrows.protocols.runtime.network.channel_runner import ChannelRunner
from narrows.protocols.runtime.network.key_files import SecretKeyFile
from narrows.worker import session
from narrows.worker.pipelining.group import WAIT_LIMIT_S, PipelineGroup, register
from narrows.worker.runtime.child_process import NotAWorkerError, WorkerOfChild, only_here
from narrows.worker.runtime.config import WorkerConfig
from narrows.worker.runtime.launcher_pipe import say_here

ALONE = Deployment({"": "127.0.0.1"}, [StageServer("", 1)], [WorkerProcess(0, 0, "", 1)])


@cache
def _place() -> tuple[Deployment, WorkerProcess]:
    """Return the deployment, and the place of this process in it, as ps-worker has set them."""
    config = WorkerConfig.from_environment()
    if config.stage is None or config.replica is None:
        return ALONE, ALONE.processes[0]
    layout = plan_file.read(config.plan)
    return layout, layout.pipeline(config.replica)[config.stage]


def stage() -> int:
    """Return the number of this process's stage, from 0."""
    return _place()[1].stage


def stages() -> int:
    """Return the number of stages of the model."""
    return len(_place()[0].stages)


def replica() -> int:
    """Return the number of this process's copy of the pipeline, from 0.

    All stages of a copy return the same number, which rank() does not. So a script cuts its data by this number.
    """
    return _place()[1].replica


def replicas() -> int:
    """Return the number of copies of the pipeline."""
    return _place()[0].replicas


def stage_layers(total: int, place: int | None = None) -> range:
    """Return the layers of a stage, as the plan says, or else in parts as equal as possible.

    Args:
        total: layers of the model.
        place: the stage; None: the stage of this process.

    Raises:
        UsageError: the plan has another number of layers.
    """
    return _place()[0].layers(total)[stage() if place is None else place]


def in_flight() -> list[int]:
    """Return for each edge the number of micro-batches in flight, there and back, as the plan says."""
    return [edge.in_flight for edge in _edges(_place()[0])]


def _edges(layout: Deployment) -> list[StageEdge]:
    """Return the edges of a deployment; plain edges if the plan names none."""
    return layout.edges or [StageEdge()] * (len(layout.stages) - 1)


def pipeline(keeps_ties: bool = False) -> dist.ProcessGroup:
    """Return the process group of the stages of this replica, with rank = stage(). It becomes torch's default group.

    The call opens the session, and waits until all stages are connected. Tensors that a schedule sends are coded as
    their edge says; tensors that the script sends itself are not coded. If two stages begin with the same parameter,
    the run ends with an error, because each stage has an optimizer of its own.

    Args:
        keeps_ties: the script keeps such tied parameters equal itself, so they are no error.

    Raises:
        UsageError: hosts are not loopback and there are no keys, the plan does not name this key, or the process has a
            process group already.
        UnreachableError: a stage did not connect in time.
    """
    group = _opened()
    if keeps_ties:
        group.allow_ties()
    return group


@cache
def _opened() -> PipelineGroup:
    """Connect the stages of this replica and make their process group. Raises as `pipeline` does."""
    layout, ours = _place()
    if dist.is_initialized():
        raise UsageError("this process has a process group: call narrows.worker.pipeline() before anything makes one")
    current = session.current()
    if isinstance(current, WorkerOfChild):
        raise NotAWorkerError("pipeline()")
    link = current.link
    key = link.key if link is not None else None
    _check_key(ours, key)
    processes = layout.pipeline(ours.replica)
    names = [f"stage {p.stage} of replica {p.replica} on {p.host or 'this machine'}" for p in processes]
    addresses, keys = [layout.address(p) for p in processes], [p.key for p in processes]
    pair = key.pair if key is not None else None
    peers = ChannelRunner(ours.stage, addresses, names, layout.digest, layout.lease, say_here, pair, keys)
    _close_at_end(peers)
    peers.wait(WAIT_LIMIT_S)
    group = PipelineGroup(
        peers,
        ours.stage,
        len(processes),
        _edges(layout),
        lambda: session.current().step_count,
        WAIT_LIMIT_S,
        _parameters,
    )
    register(group)
    return group


def _parameters() -> Iterable[tuple[str, torch.Tensor]]:
    """Return the named parameters of the model that this process trains."""
    current = session.current()
    engine = current.engine if isinstance(current, session.RunSession) else None
    return [] if engine is None else engine.model.named_parameters()


def _close_at_end(peers: ChannelRunner) -> None:
    """Close the channels before the session leaves its run, and at once if the script fails.

    So the other stages need not wait for a lease to expire.
    """
    before, close = sys.excepthook, only_here(peers.close)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        close(failed=True, code=_exit_code(error))
        before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(close)


def _exit_code(error: BaseException) -> int:
    """Return this process's exit code. If a signal stops the process, the other stages report a lost stage."""
    if isinstance(error, NarrowsError):
        return error.exit_code
    return StageLostError.exit_code if isinstance(error, KeyboardInterrupt) else 1


def _check_key(ours: WorkerProcess, key: SecretKeyFile | None) -> None:
    """Raise UsageError if this process has another key than the plan names for it."""
    if ours.key != (key.public if key is not None else ""):
        raise UsageError(
            f"--key: the plan has {ours.key or 'no key'} for this process, and --key {key.public if key else 'is not given'}"
        )
