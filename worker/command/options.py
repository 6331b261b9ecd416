"""Checks the flags of ps-worker before a process starts, and makes `WorkerOptions` of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrows.protocols.addresses import KEYLESS, is_mailbox, is_stored, parse_addresses
from narrows.protocols.config.modes import MODES, FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.distillation.limits import TEACHERS_MAX
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import given
from narrows.protocols.wire import pack
from narrows.worker.command.managers import ManagerPlace, place
from narrows.worker.runtime.config import WorkerConfig

if TYPE_CHECKING:
    from narrows.protocols.config.deployment import Deployment


@dataclass(frozen=True)
class WorkerOptions:
    """The checked flags of one ps-worker.

    Attributes:
        server: the address of the server; "": ps-worker embeds one.
        nproc: the copies of the script.
        group: the copies are one worker together.
        connect_timeout, server_timeout: seconds.
        words: the command that follows `python`: the script, or -m and a module, and its arguments.
        run: the flags of the run that the user gave, by name.
        place: the place of this ps-worker in a manager's job.
        parts: with --plan, what the plan tells each copy; else empty.

    The other attributes are the flags of the same name in docs/reference.md.
    """

    server: str
    nproc: int
    group: bool
    restarts: int
    device: str
    rank_variables: bool
    record: str
    trace: int
    connect_timeout: float
    server_timeout: float
    relay: bool
    teacher: str
    teacher_key: str
    teacher_lost: str
    teacher_coding: str
    skip_limit: int
    checkpoint_dir: str
    resume: bool
    run_id: str
    steps: int
    fresh_run: bool
    fresh: bool
    key: str
    dashboard: str
    metrics: str
    words: list[str]
    run: dict[str, Any]
    place: ManagerPlace
    parts: list[WorkerConfig]

    @property
    def workers(self) -> int:
        """The number of workers: a group is one worker, else each copy is one."""
        return 1 if self.group else self.nproc

    @property
    def server_steps(self) -> bool:
        """Whether the embedded server steps the script's optimizer."""
        return Settings(**self.run).validated().begun().mode().rule is FoldRule.OPTIMIZER

    def config(self, index: int) -> WorkerConfig:
        """Return what one copy is told, as far as the command line says it.

        Args:
            index: the number of the copy in this ps-worker.
        """
        numbered = not self.group and not self.rank_variables
        unknown = self.rank_variables and not self.group
        return replace(
            self.parts[index] if self.parts else WorkerConfig(checkpoint_dir=_absolute(self.checkpoint_dir)),
            key=_absolute(self.key),
            expect=pack(self.run) if self.run else b"",
            connect_timeout=self.connect_timeout,
            server_timeout=self.server_timeout,
            relay=self.relay,
            teachers=tuple(parse_addresses("--teacher", self.teacher)) if self.teacher else (),
            teacher_keys=tuple(map(_absolute, self.teacher_key.split(","))) if self.teacher_key else (),
            teacher_lost=self.teacher_lost,
            teacher_coding=self.teacher_coding,
            skip_limit=self.skip_limit,
            trace=self.trace,
            group=self.group,
            local_rank=self.place.local_rank * self.nproc + index if numbered else None,
            sets=tuple(name for name, value in self._ranks(index).items() if value is None) if unknown else (),
        )

    def _ranks(self, index: int) -> dict[str, int | None]:
        """Return the rank variables of one copy. None: the session sets it once the server has given the rank.

        A manager numbers its tasks, and each task is one ps-worker with `nproc` copies.
        """
        place, count = self.place, self.nproc
        rank = None if place.rank is None else place.rank * count + index
        return {
            "RANK": rank,
            "GLOBAL_RANK": rank,  # of litdata
            "LOCAL_RANK": place.local_rank * count + index,
            "WORLD_SIZE": None if place.world_size is None else place.world_size * count,
        }

    def ranks(self, index: int) -> dict[str, str]:
        """Return the rank variables of one copy, with --rank-variables; else none.

        Args:
            index: the number of the copy in this ps-worker.
        """
        alone = {"RANK": index, "GLOBAL_RANK": index, "WORLD_SIZE": self.nproc}  # until the session sets them
        ranks = self._ranks(index) if self.rank_variables else {}
        return {name: str(alone[name] if value is None else value) for name, value in ranks.items()}

    def words_of(self, index: int) -> list[str]:
        """Return the command of one copy. In it `{samples}` becomes the copy's samples of a step, if the plan has them.

        Args:
            index: the number of the copy in this ps-worker.
        """
        samples = self.parts[index].samples if self.parts else None
        return self.words if samples is None else [word.replace("{samples}", str(samples)) for word in self.words]


def _absolute(place: str) -> str:
    return place if is_stored(place) else os.path.abspath(place) if place else ""


def _parts(plan: str, host: str, folder: str) -> tuple[list[WorkerConfig], str, Deployment]:
    """Read the plan for this host.

    Args:
        plan: the path of plan.json.
        host: the name of this host in the plan; "": found by the host's name.
        folder: the folder of checkpoints; each server has a folder in it, as under ps-serve --plan. "": none.

    Returns:
        What the plan tells each process of this host, the name of the host's key file, and the plan.

    Raises:
        UsageError: the plan is wrong, or has no process for this host.
    """
    from narrows.protocols.runtime.cli import plan_file

    layout = plan_file.read(plan)
    here = plan_file.this_host(layout, host)
    names = {id(server.place): server.name.replace(" ", "-") for server in layout.servers()}
    found = [
        WorkerConfig(
            plan=os.path.abspath(plan),
            stage=process.stage,
            replica=process.replica,
            server=layout.address(layout.server_of(process)),
            checkpoint_dir=_absolute(f"{folder}/{names[id(layout.server_of(process))]}" if folder else ""),
            samples=layout.samples[process.replica] if layout.samples else None,
        )
        for process in layout.on(here)
    ]
    if not found:
        raise UsageError(f"--plan {plan}: {here} has no worker and no process of a stage")
    return found, layout.key_of(layout.on(here)[0]), layout


def checked(
    command: tuple[str, ...], module: bool, server: str | None, plan: str = "", host: str = "", **flags: Any
) -> WorkerOptions:
    """Check the command line of ps-worker.

    Args:
        command: the script or module, and its arguments.
        module: True: `command` begins with the name of a module, as with python -m.
        server: the address of the server; "": embed one, None: take the address that the manager gives.
        plan: the path of plan.json; "": no plan.
        host: the name of this host in the plan.
        flags: the other flags, by name.

    Raises:
        UsageError: a flag is wrong; the sentence names it.
    """
    run, here = given(flags), place(os.environ)
    flags["checkpoint_dir"] = "" if flags["checkpoint_dir"] == "none" else flags["checkpoint_dir"]
    parts, key, layout = _parts(plan, host, flags["checkpoint_dir"]) if plan else ([], "", None)
    if key and not flags["key"]:
        from narrows.protocols.runtime.cli import plan_file

        flags["key"] = plan_file.key_file(key, "--key")
    run |= {"plan_digest": layout.digest} if layout else {}
    if parts:
        own = {
            "--server": server,
            "--nproc": flags["nproc"] > 1,
            "--group": flags["group"],
        }
        for name in [name for name, given_ in own.items() if given_]:
            raise UsageError(f"{name}: the plan says which processes this host has, and their servers; leave it out")
        if flags["restarts"] and layout and len(layout.stages) > 1:
            raise UsageError("--restarts: a stage is not started again alone, its pipeline ends with it; leave it out")
        server, flags["nproc"] = parts[0].server, len(parts)
    options = WorkerOptions(
        words=["-m", *command] if module else [*command],
        run=run,
        place=here,
        parts=parts,
        server=here.server if server is None else server,
        **{name: value for name, value in flags.items() if name in WorkerOptions.__annotations__},
    )
    if options.nproc < 1:
        raise UsageError(f"-n {options.nproc}: give at least 1")
    if options.restarts < 0:
        raise UsageError(f"--restarts {options.restarts}: give 0 or more")
    if options.trace and not options.record:
        raise UsageError(f"--trace {options.trace}: the events go to the record; give --record FILE too")
    if options.skip_limit < 1:
        raise UsageError(f"--skip-limit {options.skip_limit}: give the number of steps, at least 1")
    for name in ("connect_timeout", "server_timeout"):
        if not 0 < getattr(options, name) < 1e6:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(options, name):g}: give a positive number of seconds")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", options.device):
        raise UsageError(f"--device {options.device}: auto, cpu or cuda[:i]")
    if not command:
        raise UsageError("name the script to run: ps-worker [flags] SCRIPT.py ARGS...")
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"{command[0]}: there is no such script")
    if options.key:
        if not options.server:
            raise UsageError("--key: the embedded server is on this machine alone and has none; give --server too")
        from narrows.protocols.runtime.network.key_files import member_key  # imports ZeroMQ, which few commands need

        member_key(options.key, "--key")
    if is_stored(options.checkpoint_dir):
        from narrows.protocols.runtime.storage.object_store import FileStore

        FileStore(options.checkpoint_dir).check()  # the workers would find out after the first step
    _check_teacher(options)
    if options.relay:
        if not options.server:
            raise UsageError("--relay: workers of this machine alone dial each other; leave it out, or give --server")
        if options.group:
            raise UsageError("--relay: only --sync gossip has a relay, and it has no --group; leave one of the two out")
        if run.get("sync", "gossip") != "gossip":
            raise UsageError(f"--relay: workers meet only under --sync gossip, not {run['sync']}; leave it out")
    if options.server:
        parse_addresses("--server", options.server)
        if is_mailbox(options.server) and not options.key:
            raise UsageError(f"--server {options.server}: {KEYLESS}")
        if run.get("sync", "ssp") not in MODES:
            Settings(sync=run["sync"]).validated()
        for name in ("resume", "run_id", "steps", "fresh_run", "dashboard", "metrics"):
            if not getattr(options, name):
                continue
            name = f"--{name.replace('_', '-')}"
            raise UsageError(f"{name} is for the embedded server: give it to the ps-serve at {options.server}")
        return options
    # A group has a shard, and so a stream, for each of its processes.
    defaults = {"workers": options.workers} | ({"shards": options.nproc} if options.group else {})
    settings = Settings(**defaults | run).validated()
    if settings.workers > options.workers:
        ours = "one worker" if options.group else f"-n {options.nproc}"
        raise UsageError(
            f"--workers {settings.workers}: the embedded server has the {ours} of this command alone; for more start ps-serve "
            "and name it with --server"
        )
    run |= {"workers": settings.workers, "shards": settings.shards}
    return options


def _check_teacher(options: WorkerOptions) -> None:
    """Raise UsageError if a flag of the teacher is wrong, or means nothing without --teacher."""
    if not options.teacher:
        if options.teacher_key:
            raise UsageError(f"--teacher-key {options.teacher_key}: give --teacher too, the address of the ps-teach")
        return
    teachers, keys = parse_addresses("--teacher", options.teacher), options.teacher_key.split(",")
    if len(teachers) > TEACHERS_MAX:
        raise UsageError(f"--teacher: {len(teachers)} addresses, and a student asks {TEACHERS_MAX} teachers at most")
    if len(keys) not in (1, len(teachers)):
        raise UsageError(
            f"--teacher-key: {len(keys)} files for {len(teachers)} teachers; give one for each, or one for all"
        )
    if options.teacher_key:
        from narrows.protocols.runtime.network.key_files import member_key

        for key in keys:
            member_key(key, "--teacher-key")
    from narrows.compression.logits import parse_logits

    try:
        parse_logits(options.teacher_coding)
    except ValueError as error:
        raise UsageError(f"--teacher-coding {options.teacher_coding}: {error}") from None
