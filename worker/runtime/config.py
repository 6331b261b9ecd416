"""The config of a worker process: all that ps-worker tells a process when it starts it, in one record.

How it works

    Launcher ── WorkerConfig.into: environment variables ──> worker process ── WorkerConfig.from_environment, told

1. VARIABLES names the environment variable of each field, and how its text is read. ps-worker sets a variable only if
   its field differs from the default, and removes the others.
2. A user may set some of the variables by hand, under plain python or torchrun: docs/reference.md lists them. So a
   process checks each text when it reads it.
3. The session of a run reads all of them once, and hands them to the engine. Calls that need no session, such as
   device(), read one field by `told`.
4. Processes that the script starts inherit the variables. `take` removes the variables that only the worker itself may
   use: it would be a second worker with the same name, or write to the pipe of the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from narrows.protocols.addresses import located, parse_addresses
from narrows.protocols.config.run_name import check_run_name
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.processes.children import STARTED_BY
from narrows.protocols.wire import pack, unpack

CONNECT_S = LOST_S = 30.0  # defaults of --connect-timeout and --server-timeout
NAME = "NARROWS_NAME"  # the run's name, for a script under plain python; ps-worker has it as --name
OFF = ("0", "false", "no", "off", "f", "n")  # texts of a switch that is off, as ps-worker takes them
TEACHER_CODING = "top:32+int8"  # default of --teacher-coding
SKIP_LIMIT = 50  # steps in a row; a GradScaler that begins at 2**16 skips some 20 before a float16 model trains


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker process is told when it starts.

    Args:
        server: the address of the server; "": the script trains alone.
        token: names this start of the worker to the coordinator; "": the session makes one up.
        expect: the packed flags of the run that the user gave to ps-worker; the server must have the same. b"": none.
        key: the path of the worker's key file, "" for none.
        connect_timeout: seconds within which a server must answer.
        server_timeout: seconds of silence after which a server counts as lost.
        relay: peers reach this worker through the relay of the run.
        skip_limit: skipped steps in a row after which the worker ends.
        checkpoint_dir: the folder or the address of --checkpoint-dir; "" or "none" for none.
        machine_dir: a folder that all workers of one ps-worker share, "" for none.
        device: where the script computes, as --device says; "": as "auto".
        arrays: "host": arrays stay on the host; "device", for tests: the CPU counts as a device; "": neither.
        local_rank: the number of this process on its machine; None: not told.
        group: the processes of this machine are one worker.
        sets: rank variables that the session sets once the server has given the rank, by name.
        plan: the path of plan.json, "" for none.
        stage: the number of this process's pipeline stage, from 0; None without a plan.
        replica: the number of this process's copy of the pipeline, from 0; None without a plan.
        samples: samples of a step of this process, by the plan; None: the plan does not say.
        started_by: pids that may be the parent of a worker; empty: no ps-worker started this process.
        parent_fd: a descriptor that reads its end when ps-worker ends; -1 for none.
        record_fd: the descriptor of the pipe to ps-worker; -1 for none.
        trace: the clocks from one traced step to the next; 0: none is traced.
        watch: the SPECs with which ps-worker --check encodes an update; empty: the script is not checked.
        tty: the terminal of breakpoint(), "" for none.
        debug: the traceback of an error of ours is printed too.
        teachers: the addresses of the teachers, empty for none.
        teacher_keys: the paths of their key files: one for each, one for all, or none.
        teacher_lost: "wait": batches wait for a teacher; "go-on": they have no soft targets while none is there.
        teacher_coding: the SPEC of a teacher's answers.
    """

    server: str = ""
    token: str = ""
    expect: bytes = b""
    key: str = ""
    connect_timeout: float = CONNECT_S
    server_timeout: float = LOST_S
    relay: bool = False
    skip_limit: int = SKIP_LIMIT
    checkpoint_dir: str = ""
    machine_dir: str = ""
    device: str = ""
    arrays: str = ""
    local_rank: int | None = None
    group: bool = False
    sets: tuple[str, ...] = ()
    plan: str = ""
    stage: int | None = None
    replica: int | None = None
    samples: int | None = None
    started_by: tuple[int, ...] = ()
    parent_fd: int = -1
    record_fd: int = -1
    trace: int = 0
    watch: tuple[str, ...] = ()
    tty: str = ""
    debug: bool = False
    teachers: tuple[str, ...] = ()
    teacher_keys: tuple[str, ...] = ()
    teacher_lost: str = "wait"
    teacher_coding: str = TEACHER_CODING

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Read all fields. Raises UsageError as `told`."""
        return WorkerConfig(**{name: told(name, env) for name in VARIABLES})

    @staticmethod
    def taken() -> WorkerConfig:
        """Read all fields, and remove the variables of PRIVATE. Raises UsageError as `told`.

        The name of the run is one of `expect`: ps-worker's, else that of NAME for a script under plain python.
        """
        config = WorkerConfig.from_environment()
        for each in PRIVATE:
            take(each)
        if not (name := os.environ.get(NAME, "")):
            return config
        check_run_name(f"{NAME}:", name)
        expect = unpack(config.expect) if config.expect else {}
        return replace(config, expect=pack({"name": name} | (expect if isinstance(expect, dict) else {})))

    def into(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with the variables of this config.

        Args:
            env: the environment without them. Its variables of other fields are removed, except those of INHERITED.
        """
        ours = {VARIABLES[name].name: VARIABLES[name].write(getattr(self, name)) for name in self._differ()}
        drop = {variable.name for field, variable in VARIABLES.items() if field not in INHERITED}
        return {name: value for name, value in env.items() if name not in drop} | ours

    def _differ(self) -> list[str]:
        """Return the names of the fields that differ from their defaults."""
        return [each.name for each in fields(self) if getattr(self, each.name) != each.default]


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable of one field.

    Args:
        name: of the variable.
        read: makes the field's value of the text. A ValueError says that the text is wrong.
        write: makes the text of the field's value.
        must: what the user must give instead of a wrong text.
    """

    name: str
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    must: str = "the two commands set it among their own processes; unset it"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    return (*text.split(),)


def _seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


SECONDS = "give a positive number of seconds"
VARIABLES = {
    "server": Variable("NARROWS_SERVER"),
    "token": Variable("NARROWS_TOKEN"),
    "expect": Variable("NARROWS_EXPECT", bytes.fromhex, bytes.hex),
    "key": Variable("NARROWS_KEY"),
    "connect_timeout": Variable("NARROWS_CONNECT_TIMEOUT", _seconds, must=SECONDS),
    "server_timeout": Variable("NARROWS_SERVER_TIMEOUT", _seconds, must=SECONDS),
    "relay": Variable("NARROWS_RELAY", lambda text: text.lower() not in OFF, lambda relay: "1"),
    "skip_limit": Variable("NARROWS_SKIP_LIMIT", _positive, must="give the number of steps, at least 1"),
    "checkpoint_dir": Variable("NARROWS_CHECKPOINT_DIR", partial(located, "NARROWS_CHECKPOINT_DIR")),
    "machine_dir": Variable("NARROWS_MACHINE_DIR"),
    "device": Variable("NARROWS_DEVICE"),
    "arrays": Variable("NARROWS_ARRAYS"),
    "local_rank": Variable("NARROWS_LOCAL_RANK", int, must="give the number of this process on its machine"),
    "group": Variable("NARROWS_GROUP", lambda text: text != "0", lambda group: "1"),
    "sets": Variable("NARROWS_SETS", _words, " ".join),
    "plan": Variable("NARROWS_PLAN"),
    "stage": Variable("NARROWS_STAGE", int),
    "replica": Variable("NARROWS_REPLICA", int),
    "samples": Variable("NARROWS_SAMPLES", int),
    "started_by": Variable(STARTED_BY, lambda text: tuple(map(int, text.split(",")))),
    "parent_fd": Variable("NARROWS_PARENT_FD", int),
    "record_fd": Variable("NARROWS_RECORD_FD", int),
    "trace": Variable("NARROWS_TRACE", _positive, must="give the number of clocks, at least 1"),
    "watch": Variable("NARROWS_WATCH", _words, " ".join),
    "tty": Variable("NARROWS_TTY"),
    "debug": Variable("NARROWS_DEBUG", bool, lambda debug: "1"),
    "teachers": Variable("NARROWS_TEACHER", lambda text: (*parse_addresses("NARROWS_TEACHER", text),), ",".join),
    "teacher_keys": Variable("NARROWS_TEACHER_KEY", lambda text: (*text.split(","),), ",".join),
    "teacher_lost": Variable("NARROWS_TEACHER_LOST"),
    "teacher_coding": Variable("NARROWS_TEACHER_CODING"),
}
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(WorkerConfig)}
PRIVATE = ("token", "key", "parent_fd")  # fields that only the session of a worker may use
INHERITED = ("arrays", "debug", "tty")  # fields without a flag: what ps-worker itself has reaches its workers


def told(name: str, env: Mapping[str, str] = os.environ) -> Any:
    """Read one field.

    Args:
        name: of the field.
        env: the environment.

    Returns:
        The field's value; its default if the variable is not set, or empty.

    Raises:
        UsageError: the text of the variable is no value of this field.
    """
    variable = VARIABLES[name]
    if not (text := env.get(variable.name, "")):
        return DEFAULTS[name]
    try:
        return variable.read(text)
    except ValueError:
        raise UsageError(f"{variable.name}={text}: {variable.must}") from None


def take(name: str) -> Any:
    """Read one field, and remove its variable: processes that the script starts do not inherit it."""
    value = told(name)
    os.environ.pop(VARIABLES[name].name, None)
    return value
