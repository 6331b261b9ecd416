"""The work of ps-serve: check the flags, choose the folder of the checkpoints, run the shards, and end.

How it works

1. `serve` resolves the addresses of --parent, --standby and --join, and names hosts that are not known yet.
2. With --join, remote_shards.py does the rest: this machine then hosts shards of another server.
3. With --standby, `original_of` asks the primary for the settings of the run; else the flags give the settings.
4. The `ShardSupervisor` begins to import what shards need. Meanwhile `checked` and `secrets_checked` check the flags
   and keys, and `serve` makes or opens the folder of the checkpoints. Without one, checkpoints go to a scratch folder.
5. `cluster.start()` starts the shards. `announce` prints the address and the ps-worker command, and writes
   --ready-file.
6. `cluster.watch()` shows events until all shards have ended; `cluster.merge()` then writes the whole model.
7. However `serve` ends, it kills the shards that are left and removes the scratch folder and folders that are still
   empty.

docs/exit-codes.md lists the exit codes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrows.protocols.addresses import ANY_HOSTS, is_loopback, is_mailbox, is_stored, parse_address
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.run_name import check_run_name, other_run
from narrows.protocols.config.settings import Robust, Settings
from narrows.protocols.config.timing import MAILBOX_LEASE_S
from narrows.protocols.errors import IncompatibleError, StageLostError, UsageError
from narrows.protocols.runtime.cli.flags import given
from narrows.protocols.runtime.network.hosts import unknown
from narrows.ps.command.console import EMBEDDED, OUT, say, tell
from narrows.ps.command.mailbox import BIND, ServedMailbox, few_round_trips, mailboxes_checked
from narrows.ps.command.one_port import OnePort
from narrows.ps.command.relay import place
from narrows.ps.command.shard_supervisor import LOOPBACK, ShardSupervisor
from narrows.ps.dashboard.run_registry import RunFacts

# The environment variable with the digest of the plan.json: ps-serve --plan sets it for the servers that it starts.
PLAN_DIGEST = "NARROWS_PLAN_DIGEST"


def checked(
    settings: Settings, bind: str, parent: str, open_to_all: bool, replicas: int = 0, one_port: bool = False
) -> tuple[str, int]:
    """Check the flags of a run against each other.

    Args:
        settings: the settings of the run.
        bind: the value of --bind.
        parent: the value of --parent, "" at the root.
        open_to_all: neither --keys nor --insecure is given, so only a loopback address is allowed.
        replicas: the value of --replicas.
        one_port: the value of --one-port.

    Returns:
        The host and the port to bind.

    Raises:
        UsageError: the flags exclude each other.
    """
    from narrows.compression import SpecError, ladder

    for name in ("compress", "compress_down", *(["start_compress"] if settings.start_steps > 0 else [])):
        try:
            codec = ladder(getattr(settings, name))
        except SpecError as error:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)}: {error}") from None
        if name == "compress" and codec.sparse and Robust.parse(settings.robust).cut:
            raise UsageError(
                f"--robust {settings.robust}: --compress {settings.compress} sends nothing of most keys, and the rest would be "
                "trimmed; choose a SPEC that sends every value, e.g. int8, or --robust cosine"
            )
    host, port = parse_address("--bind", bind, any_port=True)
    mixes = settings.mode().rule is FoldRule.MIX
    if not is_loopback(host) and open_to_all:
        raise UsageError(
            f"--bind {bind}: anyone who reaches it could join; ps-serve keys init DIR makes keys for --keys DIR, and "
            "--insecure goes without them"
        )
    if replicas and mixes:
        raise UsageError(
            f"--replicas {replicas}: under --sync gossip the workers hold the model, and go on without the server; leave it out"
        )
    if parent:
        if not is_mailbox(parent):
            parse_address("--parent", parent)
        if settings.start_steps > 0:
            raise UsageError(
                f"--start-steps {settings.start_steps}: the first steps of a cluster may be late ones of its parent's run; "
                "leave it out, and let its workers push gradients in the whole run (--sync bsp)"
            )
        if mixes:
            raise UsageError(
                "--parent: under --sync gossip no update goes through this server; choose another mode here"
            )
    if not one_port and port + settings.shards - 1 >= 65536:
        raise UsageError(
            f"--bind {bind}: --shards {settings.shards} take the ports from there on, and 65535 is the last"
        )
    return host, port


def secrets_checked(keys: str, parent: str, parent_key: str) -> None:
    """Read the server's keys and the key for its parent. Raise UsageError where a file holds no such key."""
    from narrows.protocols.runtime.network.key_files import member_key, server_key

    if keys:
        server_key(keys)
    if parent_key:
        if not parent:
            raise UsageError("--parent-key: this key is for the parent; give --parent too")
        if member_key(parent_key, "--parent-key").role != "cluster":
            raise UsageError(
                f"--parent-key {parent_key}: this is the key of a worker; the owner of the parent makes one with --role cluster"
            )


def serve(
    bind: str,
    one_port: bool,
    via: str,
    relay_at: str,
    relay_key: str,
    parent: str,
    parent_timeout: float,
    insecure: bool,
    keys: str,
    parent_key: str,
    checkpoint_dir: str,
    resume: bool,
    run_id: str,
    steps: int,
    fresh_run: bool,
    journal: bool,
    shared_memory: bool,
    replicas: int,
    standby: str,
    join: str,
    ready_file: str,
    record: str,
    trace: int,
    dashboard: str,
    metrics: str,
    **flags: Any,
) -> int:
    digest = int(os.environ.get(PLAN_DIGEST, "0"))
    if via or is_mailbox(parent):
        apart = {"--one-port": one_port and via, "--replicas": replicas, "--standby": standby, "--join": join}
        via, parent = mailboxes_checked(via, parent, bind, keys, parent_key, apart)
        bind = f"tcp://{LOOPBACK}:0" if via and bind == BIND else bind
    for flag, there in (("--parent", parent), ("--standby", standby), ("--join", join)):
        if there and not is_mailbox(there) and (why := unknown(parse_address(flag, there)[0])):
            say(f"{flag} {there}: {why}; waiting for it ...", error=True)
    if join:
        trusted("--join", join, keys, insecure, bind, "this machine")
        from narrows.ps.command import remote_shards

        named = {"--parent": parent, "--parent-key": parent_key, "--resume": resume, "--replicas": replicas}
        named |= {"--run-id": run_id, "--steps": steps, "--fresh-run": fresh_run}
        named |= {"--standby": standby, "--checkpoint-dir": checkpoint_dir, "--record": record, "--trace": trace}
        named |= {"--dashboard": dashboard, "--metrics": metrics, "--relay-at": relay_at, "--relay-key": relay_key}
        return remote_shards.join(
            join,
            bind,
            one_port,
            keys,
            given(flags),
            [flag for flag, value in named.items() if value],
            journal,
            shared_memory,
            ready_file,
            is_loopback,
            digest,
        )
    if trace and not (record or EMBEDDED):
        raise UsageError(f"--trace {trace}: the events go to the record; give --record FILE too")
    more = parent or resume or replicas or steps or fresh_run
    original = original_of(standby, keys, parent_key, insecure, bind, given(flags), more) if standby else {}
    asked = ({"lease": MAILBOX_LEASE_S} if via else {}) | given(flags)
    settings = original["settings"] if standby else asked | {"plan_digest": digest}
    cluster = ShardSupervisor(Settings(**settings).validated(), journal, ready_file)
    cluster.hash_seed = original.get("hash_seed", cluster.hash_seed)
    cluster.prepare()
    from narrows.protocols.runtime.network import encryption_cost
    from narrows.protocols.runtime.processes.scratch import ScratchFolder, lock
    from narrows.protocols.runtime.storage.object_store import FileStore
    from narrows.ps.checkpoints import checkpoint_files, store_checkpoints  # NumPy, as the fork server imports its own

    folder, scratch, held, served = "", None, None, None
    store = FileStore(checkpoint_dir) if is_stored(checkpoint_dir) else None
    try:
        if via:
            few_round_trips(cluster.settings)
        cluster.host, cluster.port = checked(cluster.settings, bind, parent, not (keys or insecure), replicas, one_port)
        secrets_checked(keys, parent or original.get("parent", ""), parent_key)
        cluster.run_id = run_id
        if store is not None:
            store.check()
            scratch = ScratchFolder()  # what has a name in it is in the store
            store_checkpoints.begin(store, Path(scratch.path), resume, fresh_run, say)
            folder = scratch.path
        else:
            if fresh_run:
                begin_anew(checkpoint_dir)
            folder = checkpoint_files.make_folder(checkpoint_dir, resume)
        if resume and folder:
            check_folder(Path(folder), cluster.settings.name, checkpoint_dir)
        if resume and (told := ended(Path(folder), run_id, steps, checkpoint_dir)):
            say(told)
        held = lock(folder) if folder else None
        mixes = cluster.settings.mode().rule is FoldRule.MIX  # gossip: the workers hold the models
        relay, relay_secret = place(relay_at, relay_key, one_port, mixes)
        if resume and not mixes and (why := checkpoint_files.why_anew(folder, checkpoint_dir)):
            say(f"--resume: {why}")
        if store is not None and resume:
            store_checkpoints.drop_after(store, max(checkpoint_files.clocks(Path(folder), 0), default=-1))
        if not folder:
            scratch = ScratchFolder()  # holds the checkpoints from which a dead shard is restarted
        if scratch and store is None and cluster.settings.checkpoint_every > 0:
            every = f"--checkpoint-every {cluster.settings.checkpoint_every:g}"
            say(f"{every}: without --checkpoint-dir checkpoints serve shards that die, and are removed at the end")
        if record:
            cluster.run_watch.open_record(record, say)
        page = (cluster.host, cluster.port) if one_port else None
        if one_port:
            cluster.behind(OnePort(cluster.host, cluster.port, "" if relay else relay_secret))
        front = cluster.reached_at if one_port else None
        cluster.run_watch.open_sites(dashboard, metrics, bool(keys or insecure), page, front)
        if via or is_mailbox(parent):
            served = ServedMailbox(via, parent, keys)
            cluster.config = replace(cluster.config, via=via, claim=served.claim, round_trip=served.round_trip_s)
        cluster.config = replace(
            cluster.config,
            first_epoch=time.time_ns() // 1_000_000 << 10,  # greater than the epochs of earlier processes of this run
            checkpoint_dir=scratch.path if scratch else folder,
            store=store.address if store is not None else "",
            keeps=bool(folder),
            secret=secrets.token_hex(16),
            resume=resume,
            parent=parent,
            parent_timeout=parent_timeout,
            keys=os.path.abspath(keys) if keys else "",
            parent_key=os.path.abspath(parent_key) if parent_key else "",
            seals=encryption_cost.rate() if keys else 0.0,
            replicas=replicas,
            shared_memory=shared_memory,
            trace=trace,
            relay=relay,
            relay_secret=relay_secret,
        )
        if standby:
            cluster.follow(standby, original)
        cluster.listen()
        cluster.start()
        if not cluster.signals:
            announce(cluster)
            if not EMBEDDED:
                cluster.reshard_request.listen(cluster.reached_at[1])
            cluster.write_ready()  # last: all of the above is there for whoever waits for the file
            code = cluster.watch()
            cluster.run_watch.note("done", {"text": "the run is over"})
            if code:
                return code
            cluster.merge()
            cluster.close_port()
        if cluster.restart_policy.deserted.finished:
            return StageLostError.exit_code
        return 128 + cluster.signals[0] if cluster.signals and not EMBEDDED else 0
    finally:
        cluster.kill()
        if served is not None:
            served.close()
        if scratch:
            scratch.close()
        if held is not None:
            os.close(held)
        if not checkpoint_dir and folder and store is None:
            for empty in (folder, checkpoint_files.DEFAULT):
                with contextlib.suppress(OSError):
                    os.rmdir(empty)


def check_folder(folder: Path, name: str, told: str = "") -> None:
    """Check that --resume goes on with the run of this name. A run without a name may get one.

    Args:
        folder: of the checkpoints.
        name: the value of --name.
        told: the value of --checkpoint-dir, for errors; "": the folder.

    Raises:
        UsageError: the checkpoints in `folder` are of a run with another name.
    """
    from narrows.ps.checkpoints import checkpoint_files

    if (kept := checkpoint_files.run_name(folder)) not in ("", name):
        here = f"--name {name}" if name else "no --name"
        raise UsageError(
            f"--resume: {told or folder} has checkpoints of the run {kept}, and {here} was given: give --name {kept} to go "
            "on with it, or name another --checkpoint-dir"
        )


def begin_anew(folder: str) -> None:
    """Move the files of an earlier run to a folder inside `folder`. Raise UsageError where that fails."""
    from narrows.ps.checkpoints import checkpoint_files

    if folder in ("", "none"):
        raise UsageError("--fresh-run: name the folder with --checkpoint-dir; without, each run has a new one")
    try:
        kept = checkpoint_files.move_aside(Path(folder)) if Path(folder).is_dir() else ""
    except OSError as error:
        raise UsageError(
            f"--fresh-run: {folder}: {error.strerror}; name another folder with --checkpoint-dir"
        ) from None
    if kept:
        say(f"files of an earlier run in {folder} are now in {kept}")


def ended(folder: Path, run_id: str, steps: int, told: str = "") -> str:
    """Describe what --resume does with a run that has already ended.

    Args:
        folder: the folder of the checkpoints.
        run_id: the value of --run-id. Workers of the run with this name may join again, to get its model.
        steps: the value of --steps, 0 where it is not given. A run that ended after fewer steps goes on.
        told: the value of --checkpoint-dir, for what is printed; "": the folder.

    Returns:
        A line for the console; "" if no run has ended in this folder, or if the run goes on to `steps`.

    Raises:
        UsageError: the run has ended for good. Workers would make no step and show the model of another script or seed.
    """
    from narrows.ps.checkpoints import whole_model

    end = whole_model.end_of(folder)
    if end is None or end["steps"] < steps != 0:
        return ""
    after = f"the run in {told or folder} has ended" + (f", after {end['steps']} steps" if end["steps"] >= 0 else "")
    if run_id and end.get("run_id") == run_id:
        return f"{after}; workers of run {run_id} that join again get its model"
    more = max(end["steps"], 0)
    raise UsageError(
        f"--resume: {after}: name another --checkpoint-dir for a new run, give --steps N with more than {more} to train on, or "
        "--fresh-run to begin anew there"
    )


def original_of(
    standby: str, keys: str, parent_key: str, insecure: bool, bind: str, flags: dict[str, Any], more: Any
) -> dict[str, Any]:
    """Ask the primary at the address `standby` for what its standby needs.

    Args:
        standby: the address of the primary.
        keys: the folder of the server's keys, "" for none.
        parent_key: the file of the cluster's key at its parent, "" for none.
        insecure: the user allows addresses beyond loopback without keys.
        bind: the value of --bind of this standby.
        flags: the flags of a run that the user has given. Only `name` is allowed: the primary has the others.
        more: true if the user has given another flag that the primary decides, such as --resume.

    Returns:
        The primary's settings, its ports, and the values that it gives its shards.

    Raises:
        UsageError: a flag does not go with --standby.
        UnreachableError: the primary does not answer.
        IncompatibleError: the primary's run has another name.
    """
    from narrows.ps.process.bootstrap_client import ask

    check_run_name("--name", name := flags.pop("name", ""))
    if flags or more:
        which = f"--{next(iter(flags)).replace('_', '-')}" if flags else "--parent, --resume and --replicas"
        raise UsageError(f"--standby: the flags of the run come from the server at {standby}; leave out {which}")
    trusted("--standby", standby, keys, insecure, bind, "this standby")
    answer = ask("--standby", standby, keys)
    if text := other_run(name or answer["settings"]["name"], answer["settings"]["name"]):
        raise IncompatibleError(f"{standby}: {text}")
    if answer["has_parent_key"] and not parent_key:
        raise UsageError(
            f"--standby {standby}: that cluster has a key for its parent; give --parent-key with a copy of the file"
        )
    if parent_key and not answer["has_parent_key"]:
        raise UsageError(f"--parent-key {parent_key}: the server at {standby} has none; leave it out")
    return answer


def trusted(flag: str, address: str, keys: str, insecure: bool, bind: str, name: str) -> None:
    """Check that this server may trust the server at `address`, and that workers elsewhere can dial this server.

    Raises:
        UsageError: an address is beyond loopback and neither --keys nor --insecure is given, or this server binds a
            loopback address while the other server stands on another machine.
    """
    (there, _), (host, _) = parse_address(flag, address), parse_address("--bind", bind, any_port=True)
    if not (keys or insecure or (is_loopback(host) and is_loopback(there))):
        text = "this machine must trust it; give --keys with a copy of its folder, or --insecure"
        raise UsageError(f"{flag} {address}: {text}")
    if is_loopback(host) and not is_loopback(there):
        raise UsageError(f"--bind {bind}: workers elsewhere could not dial {name}; give --bind tcp://HOST:PORT")


def announce(cluster: ShardSupervisor) -> None:
    """Print the address at which workers can join."""
    host, port = cluster.reached_at
    address = cluster.config.via or f"tcp://{socket.gethostname() if host in ANY_HOSTS else host}:{port}"
    cluster.serve_at(address)
    settings = cluster.settings.flagged()
    names = ["compress", "workers", "shards", "local_steps", "local_seconds", "fragments"]
    names += ["start_steps", "start_compress"] if settings.start_steps > 0 else []
    values = {name: getattr(settings, name) for name in names}
    values |= {
        "name": settings.name,
        "summary": settings.summary(),
        "address": address,
        "began": cluster.run_watch.began_unix,
    }
    cluster.run_watch.note("run", {"mode": settings.sync, **values})
    for site in cluster.run_watch.sites:
        say(site.told)
    facts = RunFacts(settings.name, address, settings.sync, settings.summary(), wanted=settings.workers)
    facts = replace(facts, parent=cluster.config.parent, copies=cluster.follows.get(0, ""))
    if why := cluster.run_watch.enter(facts):
        say(f"ps-serve runs does not list this run: {why}", error=True)
    if cluster.follows:
        return say(f"copies the server at {cluster.follows[0]}; it listens at {address}")
    if cluster.config.replicas:
        cluster.standby_notice.expect()
    if EMBEDDED:
        tell("serves", address=address)
    else:
        noun = "shard" if cluster.settings.shards == 1 else "shards"
        key = "--key NAME.key " if cluster.config.keys else ""
        key += f"--name {settings.name} " if settings.name else ""
        run = f"run {settings.name}: " if settings.name else ""
        say(f"{run}serves {cluster.settings.shards} {noun}, {settings.summary()}")
        folder = f"to {cluster.config.kept_at}" if cluster.config.keeps else "nowhere"
        say(f"checkpoints and the final model go {folder}; on a worker machine:")
        OUT.line(f"    ps-worker --server {address} {key}SCRIPT.py")
        if cluster.config.relay_secret:
            say("a worker that its peers cannot dial, as behind a NAT: give it --relay too")
    if seals := cluster.config.seals:
        say(f"messages are encrypted; a core of this machine seals {seals / 1e6:,.0f} MB/s")
