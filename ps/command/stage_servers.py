"""ps-serve --plan: the servers of this host in a plan, those of stages, of clusters and of remote shards.

Each server is a ps-serve process of its own.

How it works

1. `serve` reads the plan, and takes the servers that stand on this host. `watching` hands the flags of OF_ROOT to them.
2. With --resume, `go_back` finds the newest clock of which all stages have a checkpoint, and drops later checkpoints.
3. `StageServers.watch` starts the servers, prints their lines with their names, and passes signals on to them.
4. When all have ended, `watch` returns the exit code of the first that failed.

Rules
- A server that does not reach its parent is started again, until MEET_S: the hosts of a plan begin in any order.
- All stages resume from one clock. With --resume, before the servers start, the hosts tell each other the clocks of
  their checkpoints, at the addresses of their servers. Later checkpoints are dropped.
- A pipeline that has lost a stage does not recover while its servers run. So a stage whose last worker is lost ends,
  with exit code 6.
- If one server fails, all servers of this host are ended as by Ctrl-C. If this command is killed, its servers write a
  checkpoint and end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from narrows.protocols.addresses import is_stored
from narrows.protocols.config.deployment import Deployment, ServerStart
from narrows.protocols.config.run_name import check_run_name
from narrows.protocols.errors import RemoteProtocolError, ServerLostError, UnreachableError, UsageError
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.cli import plan_file
from narrows.protocols.runtime.processes import signals
from narrows.protocols.runtime.processes.children import ChildProcesses, StartedChild
from narrows.protocols.runtime.storage.object_store import FileStore
from narrows.ps.command.console import doing, say
from narrows.ps.command.restart_policy import DESERTED
from narrows.ps.command.serve import PLAN_DIGEST
from narrows.ps.dashboard.run_registry import VARIABLE

MEET_S = 600.0  # all hosts must have begun within this
TAG = 0  # of the messages in which hosts tell each other their clocks
DESERTED_LEASES, DESERTED_LEAST_S = 2, 2.0  # leases, and least seconds, until a stage without workers ends
OF_EACH = ("name", "run_id", "steps", "fresh_run")  # flags that each server gets
OF_ROOT = ("dashboard", "metrics", "record", "replicas")  # flags of the root's server, which knows all levels below it


def serve(
    plan: str,
    host: str,
    keys: str,
    checkpoint_dir: str,
    resume: bool,
    journal: bool,
    shared_memory: bool,
    ready_file: str,
    **more: Any,
) -> int:
    """Run the servers of this host.

    Args:
        plan: the file of the plan.
        host: the name of this host in the plan, "" for its hostname.
        keys: the folder of the keys, "" for the one that the plan names.
        checkpoint_dir: the folder in which each server has a folder of checkpoints.
        resume: resume from the newest clock that all stages have a checkpoint of.
        journal: shards keep journals.
        shared_memory: the value of --shared-memory.
        ready_file: each server writes this file with its name appended; "" for none.
        more: the flags of OF_EACH and of OF_ROOT.

    Returns:
        The exit code.

    Raises:
        UsageError: the file is no plan, a flag is for another host, or the stages have no checkpoint of one clock.
    """
    layout = plan_file.read(plan)
    here = plan_file.this_host(layout, host)
    servers = [server for server in layout.servers(keys) if server.place.host == here]
    if not servers:
        raise UsageError(
            f"--plan {plan}: no server stands on {here}; its workers are started with ps-worker --plan {plan}"
        )
    check_run_name("--name", more["name"] or "")
    named = ["--name", more["name"]] if more["name"] else []
    each = [*(["--run-id", more["run_id"]] if more["run_id"] else []), *["--fresh-run"] * more["fresh_run"]]
    each += ["--steps", str(more["steps"])] if more["steps"] else []
    watched = watching(layout, here, {name: more[name] for name in OF_ROOT})
    if resume and not checkpoint_dir:
        raise UsageError("--resume: name the folder with --checkpoint-dir")
    if resume and layout.served(here):
        go_back(layout, here, checkpoint_dir, keys or layout.keys)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NARROWS_") or name == VARIABLE
    }
    environment |= {"PYTHONSAFEPATH": "1", PLAN_DIGEST: str(layout.digest)}
    if len(layout.stages) > 1:
        environment[DESERTED] = str(max(DESERTED_LEAST_S, DESERTED_LEASES * layout.lease))

    def words(server: ServerStart) -> list[str]:
        name = server.name.replace(" ", "-")
        more = [*named, "--journal" if journal else "--no-journal"]
        more += [] if shared_memory else ["--no-shared-memory"]
        if server.children:  # the checkpoints of remote shards are with the server that they join
            folder = checkpoint_dir if checkpoint_dir in ("", "none") else f"{checkpoint_dir}/{name}"
            more += [*(["--checkpoint-dir", folder] if folder else []), *["--resume"] * resume, *each]
        more += ["--ready-file", f"{ready_file}.{name}"] if ready_file else []
        more += watched.get(name, [])
        flags = [*server.flags]
        for at in [at for at, flag in enumerate(flags, 1) if flag == "--parent-key"]:
            flags[at] = plan_file.key_file(flags[at], "--parent-key")
        return ["-m", "narrows.ps.command.cli", *flags, *more]

    return StageServers(servers, [words(server) for server in servers], environment).watch()


def watching(layout: Deployment, here: str, given: dict[str, Any]) -> dict[str, list[str]]:
    """Return the flags of OF_ROOT for each server of this host, by its name.

    The root's server gets all of them. In a pipeline each stage gets --record, and nothing else.

    Args:
        layout: the plan.
        here: the name of this host.
        given: the values of the flags of OF_ROOT.

    Raises:
        UsageError: no server of this host takes a flag that is given.
    """
    given, root = {name: value for name, value in given.items() if value}, layout.stages[0]
    names = [f"stage-{index}" for index in layout.served(here)]
    if len(layout.stages) > 1:
        for name in [name for name in given if name != "record"]:
            raise UsageError(
                f"--{name}: each of the {len(layout.stages)} stages is a run of its own, and no server knows all of them; "
                "leave it out, --record FILE writes a record of each stage"
            )
        return {name: ["--record", f"{file}.{name}"] for name in names for file in given.values()}
    if given and not names:
        raise UsageError(
            f"--{next(iter(given))}: the root's server takes it, which stands on {root.host}; give it there"
        )
    return {name: [word for flag, value in given.items() for word in (f"--{flag}", str(value))] for name in names}


class StageServers:
    """The servers of this host, started and ended together.

    Args:
        servers: the servers.
        words: for each server, the command line after `python`.
        environment: the environment of all servers.
    """

    def __init__(self, servers: list[ServerStart], words: list[list[str]], environment: dict[str, str]) -> None:
        self.servers, self.words, self.environment = servers, words, environment
        self.children = ChildProcesses()
        self.started: dict[int, StartedChild] = {}  # by index in `servers`
        self.codes: dict[int, int] = {}  # exit codes of servers that have ended; minus the signal that killed one
        self.parent_fd, _ = os.pipe()  # servers see the end of this pipe when this process ends, however it ends
        self.heard: list[int] = []  # signals received
        self.meet_by = time.monotonic() + MEET_S
        signals.hear(self.heard)

    def watch(self) -> int:
        """Wait until all servers have ended.

        Returns:
            The exit code of the first server that failed, else that of a signal, else 0.
        """
        if self.children.given:  # this command was forked, so its fork server has imported all that servers need
            self.children.prepare(self.environment, [])
            self.children.next(MEET_S)
        for index in range(len(self.servers)):
            self._start(index)
        shown = 0
        while len(self.codes) < len(self.started):
            match self.children.next(0.2):
                case (index, "exit", code) if index >= 0:
                    self._ended(index, code)
                case (index, kind, str(line)) if index >= 0:
                    say(f"{self.servers[index].name}: {line.removeprefix('ps-serve: ')}", error=kind == "err")
            for number in self.heard[shown:]:
                for child in self.started.values():
                    child.signal(number)
            shown = len(self.heard)
        by_signal = {128 + number for number in (*self.heard, signal.SIGINT)}  # servers that end so have not failed
        codes = [abs(code) + 128 * (code < 0) for code in self.codes.values()]
        failed = [code for code in codes if code and code not in by_signal]
        return failed[0] if failed else 128 + self.heard[0] if self.heard else 0

    def _start(self, index: int) -> None:
        listens: dict[int | str, str] = {1: "out", 2: "err"}
        words, passed = self.words[index], {"NARROWS_PARENT_FD": self.parent_fd}
        self.started[index] = self.children.start(
            *(index, words, self.environment), listens=listens, passed=passed, name="ps-serve", nests=True
        )

    def _ended(self, index: int, code: int) -> None:
        server = self.servers[index]
        if code == UnreachableError.exit_code and server.above and not self.heard and time.monotonic() < self.meet_by:
            doing(f"{server.name} is started again, and waits for the server at {server.above} ...")
            return self._start(index)
        # A server that loses its parent after a signal has not failed: the same signal has ended the parent.
        self.codes[index] = 0 if self.heard and code == ServerLostError.exit_code else code
        if code and not self.heard:
            text = f"the server of {server.name} ended with exit code {code}; the others of this host end too"
            say(text, error=True)
            self.heard.append(signal.SIGINT)


def go_back(layout: Deployment, here: str, folder: str | Path, keys: str) -> int:
    """Drop checkpoints of this host's stages that are newer than the newest clock of which all stages have one.

    Args:
        layout: the plan.
        here: the name of this host.
        folder: the folder, or the address, of the checkpoints of this host's servers.
        keys: the folder of the keys, "" for none.

    Returns:
        That clock, -1 where no stage has a checkpoint.

    Raises:
        UsageError: the stages have no checkpoint of one clock.
    """
    from narrows.ps.checkpoints import checkpoint_files, store_checkpoints  # they import NumPy

    names = {stage: f"{folder}/stage-{stage}" for stage in layout.served(here)}
    stores = {stage: FileStore(name) for stage, name in names.items() if is_stored(name)}
    ours = {
        stage: store_checkpoints.whole(stores[stage]) if stage in stores else checkpoint_files.whole(Path(name))
        for stage, name in names.items()
    }
    having = _all_stages(layout, here, ours, keys)
    clock = max(set.intersection(*(set(clocks) for clocks in having.values())), default=-1)
    if clock < 0 and any(having.values()):
        has = "; ".join(f"stage {s}: {', '.join(map(str, c)) or 'none'}" for s, c in sorted(having.items()))
        raise UsageError(f"--resume: the stages have no checkpoint of one clock ({has}), so the run cannot go on")
    for stage, name in names.items() if clock >= 0 else ():
        if stage in stores:
            store_checkpoints.drop_after(stores[stage], clock)
        else:
            checkpoint_files.drop_all_after(Path(name), clock)
    doing(f"all stages go on from clock {clock}" if clock >= 0 else "no stage has a checkpoint, so the run begins anew")
    return clock


def _all_stages(layout: Deployment, here: str, ours: dict[int, list[int]], keys: str) -> dict[int, list[int]]:
    """Return the clocks of every stage's checkpoints, exchanged with the ps-serve --plan of each other host."""
    hosts = sorted({stage.host for stage in layout.stages})
    if len(hosts) == 1:
        return ours
    from narrows.protocols.runtime.network.channel_runner import NO_STEP, ChannelRunner
    from narrows.protocols.runtime.network.key_files import server_key

    doing(f"asks the servers of {', '.join(set(hosts) - {here})} which checkpoints they have ...")
    addresses = [layout.address(layout.stages[layout.served(host)[0]]) for host in hosts]
    secret = server_key(keys) if keys else None
    with_keys = (secret.pair, [secret.public] * len(hosts)) if secret else ()
    names = [f"ps-serve --plan on {host}" for host in hosts]
    peers = ChannelRunner(hosts.index(here), addresses, names, layout.digest, layout.lease, say, *with_keys)
    failed = True
    try:
        peers.wait(MEET_S)
        having, others = dict(ours), [rank for rank, host in enumerate(hosts) if host != here]
        for other in others:
            peers.send(other, NO_STEP, TAG, json.dumps([*ours.items()]).encode(), MEET_S)
        for other in others:
            having |= _told(peers.receive(other, TAG, MEET_S).payload)
        failed = False
        return having
    finally:
        peers.close(failed)


def _told(payload: Buffer) -> dict[int, list[int]]:
    try:
        return {int(stage): [int(clock) for clock in clocks] for stage, clocks in json.loads(bytes(payload))}
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"the clocks of another host are not readable: {error}") from None
