"""ps-serve at work: what its flags mean, where its files go, and how it ends. Exit codes: docs/reference.md."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from typing import Any

import click

from narrows.protocols.addresses import ANY_HOSTS, parse_address
from narrows.protocols.errors import UsageError
from narrows.protocols.modes import Rule
from narrows.protocols.runtime.flags import given
from narrows.protocols.settings import Settings
from narrows.ps.command.cluster import EMBEDDED, Cluster, say


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def checked(settings: Settings, bind: str, parent: str, insecure: bool, resume: bool) -> tuple[str, int]:
    """(host, port) to bind. Raises UsageError where the flags do not go together."""
    from narrows.compression import SpecError, ladder

    for name in ("compress", "compress_down"):
        try:
            ladder(getattr(settings, name))
        except SpecError as error:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)}: {error}") from None
    host, port = parse_address("--bind", bind, any_port=True)
    mixes = settings.mode().rule is Rule.MIX
    if not is_loopback(host) and not insecure:
        raise UsageError(f"--bind {bind}: anyone who reaches it could join; keep to loopback or say --insecure")
    if resume and mixes:
        raise UsageError(
            "--resume: under --sync gossip the model is with the workers, and a run begins with theirs; load model.safetensors "
            "of --checkpoint-dir in the script"
        )
    if parent:
        parse_address("--parent", parent)
        if mixes:
            raise UsageError(
                "--parent: under --sync gossip no update goes through this server; choose another mode here"
            )
    if port + settings.shards - 1 >= 65536:
        raise UsageError(
            f"--bind {bind}: --shards {settings.shards} take the ports from there on, and 65535 is the last"
        )
    return host, port


def serve(
    bind: str,
    parent: str,
    parent_timeout: float,
    insecure: bool,
    checkpoint_dir: str,
    resume: bool,
    ready_file: str,
    **flags: Any,
) -> int:
    cluster = Cluster(Settings(**given(flags)).validated())
    cluster.prepare()
    from narrows.ps.process import checkpoints  # and NumPy, while others import

    folder = scratch = ""
    try:
        cluster.host, cluster.port = checked(cluster.settings, bind, parent, insecure, resume)
        folder = checkpoints.make_folder(checkpoint_dir, resume)
        scratch = "" if folder else tempfile.mkdtemp(prefix="narrows-")  # a shard that dies goes on from there
        cluster.ready_file = ready_file
        cluster.told = {
            "first_epoch": time.time_ns() // 1_000_000 << 10,  # greater than in any earlier life of this run
            "checkpoint_dir": folder or scratch,
            "keeps": bool(folder),
            "secret": secrets.token_hex(16),
            "resume": resume,
            "parent": parent,
            "parent_timeout": parent_timeout,
        }
        cluster.listen()
        cluster.start()
        if not cluster.signals:
            announce(cluster)
            if code := cluster.watch():
                return code
            cluster.merge()
        return 128 + cluster.signals[0] if cluster.signals and not EMBEDDED else 0
    finally:
        cluster.kill()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        if not checkpoint_dir and folder:
            for empty in (folder, checkpoints.DEFAULT):
                with contextlib.suppress(OSError):
                    os.rmdir(empty)


def announce(cluster: Cluster) -> None:
    """Say that workers can join, and where."""
    shown = socket.gethostname() if cluster.host in ANY_HOSTS else cluster.host
    cluster.address = address = f"tcp://{shown}:{cluster.ports[0]}"
    cluster.write_ready()
    if EMBEDDED:
        print(json.dumps({"event": "serves", "address": address}), flush=True)
    else:
        noun = "shard" if cluster.settings.shards == 1 else "shards"
        say(f"serves {cluster.settings.shards} {noun}, --sync {cluster.settings.sync}; on a worker machine:")
        click.echo(f"    ps-worker --server {address} SCRIPT.py")
