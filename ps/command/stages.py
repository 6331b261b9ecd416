"""ps-serve --plan: the servers of the stages that stand on this host, each a ps-serve of its own.

Rules
- Stages go on from one clock. With --resume the hosts tell each other which clocks their checkpoints have, at the addresses of
  their servers, before these start. Later checkpoints are dropped.
- Where one server fails, all of this host are ended as by Ctrl-C. Where this command is killed, its servers write a checkpoint
  and end.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer
from narrows.protocols.planning.layout import Layout
from narrows.protocols.runtime import plans, signals
from narrows.protocols.runtime.children import Child, Children
from narrows.ps.command.console import doing, say

MEET_S = 600.0  # all hosts have begun within this
TAG = 0


def serve(plan: str, host: str, keys: str, checkpoint_dir: str, resume: bool, journal: bool, ready_file: str) -> int:
    """Raises UsageError where the plan is none, or the stages have no checkpoint in common."""
    layout = plans.read(plan)
    here = plans.this_host(layout, host)
    served = layout.served(here)
    if not served:
        raise UsageError(f"--plan {plan}: no stage has its server on {here}")
    if resume and not checkpoint_dir:
        raise UsageError("--resume: name the folder with --checkpoint-dir")
    if resume:
        go_back(layout, here, Path(checkpoint_dir), keys)
    heard: list[int] = []
    signals.hear(heard)
    children, started = Children(), []
    parent_fd, _ = os.pipe()  # its end tells the servers that we ended, however that was
    for stage in served:
        words = ["-m", "narrows.ps.command.cli", "--bind", layout.address(layout.stages[stage])]
        for name, value in layout.settings(stage).items():
            words += ["--" + name.replace("_", "-"), str(value)]
        folder = checkpoint_dir if checkpoint_dir in ("", "none") else f"{checkpoint_dir}/stage-{stage}"
        words += ["--checkpoint-dir", folder] if folder else []
        words += ["--keys", keys] if keys else ["--insecure"] if layout.insecure else []
        words += [*["--resume"] * resume, "--journal" if journal else "--no-journal"]
        words += ["--ready-file", f"{ready_file}.stage-{stage}"] if ready_file else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NARROWS_")}
        environment["PYTHONSAFEPATH"] = "1"
        started.append(
            children.start(
                *(stage, words, environment), listens={1: "out", 2: "err"}, passed={"NARROWS_PARENT_FD": parent_fd}
            )
        )
    return _watch(children, started, heard)


def _watch(children: Children, started: list[Child], heard: list[int]) -> int:
    """Until all have ended: the code of the first that failed, else 0, or what a signal says."""
    codes: dict[int, int] = {}
    told = 0
    while len(codes) < len(started):
        match children.next(0.2):
            case (stage, "exit", code):
                codes[stage] = code
                if code and not heard:
                    say(
                        f"the server of stage {stage} ended with exit code {code}; the others of this host end too",
                        error=True,
                    )
                    heard.append(signal.SIGINT)
            case (stage, kind, str(line)):
                say(f"stage {stage}: {line.removeprefix('ps-serve: ')}", error=kind == "err")
        for number in heard[told:]:
            for child in started:
                child.signal(number)
        told = len(heard)
    failed = [code for code in codes.values() if code and code != 128 + signal.SIGINT]
    return failed[0] if failed else 128 + heard[0] if heard else 0


def go_back(layout: Layout, here: str, folder: Path, keys: str) -> int:
    """Drop what the stages of this host have written after the newest clock that all stages have. Return that clock, -1 where
    no stage has any. Raises UsageError where they have none in common."""
    from narrows.ps.process import checkpoints  # and NumPy

    ours = {stage: checkpoints.whole(folder / f"stage-{stage}") for stage in layout.served(here)}
    having = _all_stages(layout, here, ours, keys)
    clock = max(set.intersection(*(set(clocks) for clocks in having.values())), default=-1)
    if clock < 0 and any(having.values()):
        has = "; ".join(f"stage {s}: {', '.join(map(str, c)) or 'none'}" for s, c in sorted(having.items()))
        raise UsageError(f"--resume: the stages have no checkpoint of one clock ({has}), so the run cannot go on")
    for stage in ours if clock >= 0 else ():
        checkpoints.drop_all_after(folder / f"stage-{stage}", clock)
    doing(f"all stages go on from clock {clock}" if clock >= 0 else "no stage has a checkpoint, so the run begins anew")
    return clock


def _all_stages(layout: Layout, here: str, ours: dict[int, list[int]], keys: str) -> dict[int, list[int]]:
    """The clocks of every stage, told by the ps-serve --plan of each host."""
    hosts = sorted({stage.host for stage in layout.stages})
    if len(hosts) == 1:
        return ours
    from narrows.protocols.runtime.keys import server_key
    from narrows.protocols.runtime.peers import NO_STEP, Peers

    doing(f"asks the servers of {', '.join(set(hosts) - {here})} which checkpoints they have ...")
    addresses = [layout.address(layout.stages[layout.served(host)[0]]) for host in hosts]
    secret = server_key(keys) if keys else None
    with_keys = (secret.pair, [secret.public] * len(hosts)) if secret else ()
    names = [f"ps-serve --plan on {host}" for host in hosts]
    peers = Peers(hosts.index(here), addresses, names, layout.digest, layout.lease, say, *with_keys)
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
