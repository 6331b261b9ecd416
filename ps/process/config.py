"""The config of a shard process: all that ps-serve tells a process when it starts it, in one record.

How it works

    ShardSupervisor ── ServerConfig.encode, the first line of stdin ──> main ── ServerConfig.decode ──> ServerRunner
                    ── open files, named in the environment ─────────────^

A file cannot travel in a line of text. So ps-serve passes the files of the journal to the process, and JOURNAL
names the environment variables that hold their descriptors there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrows.protocols.addresses import ANY_HOSTS, LOCAL_HOSTS, local_endpoint, parse_address
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import LocalProtocolError
from narrows.protocols.runtime.storage.object_store import FileStore
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy, StoreCopy

JOURNAL = tuple(f"NARROWS_JOURNAL_{file}" for file in range(7))  # environment variables: descriptors of its files
OF_PRIMARY = ("secret", "parent_timeout", "first_epoch", "replicas")  # fields that a standby takes from its primary
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What one shard process is told when it starts.

    Args:
        index: the number of the shard.
        settings: the settings of the run.
        bind: tcp://host:port; port 0 or * takes any.
        one_port: the address of the one port before all shards (--one-port), tcp://host:port; "": each has its own.
        via: the address of the mailbox in which members meet this server (--via), "" for none.
        claim: the epoch of this server in that mailbox.
        round_trip: seconds of a round trip through the slowest mailbox of this process, 0.0 without one.
        coordinator: the address of process 0, "" in process 0.
        first_epoch: the epochs of this process begin here, if no checkpoint has a later one.
        checkpoint_dir: the folder of checkpoints, "" for none.
        store: the address that has a copy of each file of the folder, s3://BUCKET/NAME; "" for none.
        resume: the process begins with the newest checkpoint.
        again: a shard of this server was restarted in this run, so the workers join again.
        keeps: the user keeps the checkpoints after the run, so the last one is written too.
        secret: shared by the shards of this server: a Report must come from a process that knows it.
        parent: the address of the parent's process 0, "" if this server is a root.
        parent_timeout: seconds of silence after which the parent counts as lost.
        keys: the folder of --keys, "" if connections are not encrypted.
        parent_key: the file of --parent-key, "" for none.
        seals: bytes per second that one core of this machine encrypts, 0 if not measured.
        replay: the process goes on with the machine in the journal.
        done: shards that had ended when this process was restarted.
        replicas: the number of standbys that may follow this server.
        follows: the address of the shard that this one follows as a standby, "" for none.
        host: of a remote shard, the host at which members reach it, HOST:PORT behind one port; else "".
        watched: a console or dashboard shows the members' summaries.
        trace: the clocks from one traced update to the next; 0: none is traced.
        away: (shard, host) of each remote shard.
        shared_memory: large frames between this process and others of this machine lie in shared memory.
        relay: the address of the relay at which workers of a gossip run may meet; "": it is at the one port.
        relay_secret: shared with that relay, in hex digits; "": there is none.
        journal: the descriptors of the journal's files, None without a journal.

    Raises:
        LocalProtocolError: a value is not of its field's type.
    """

    index: int
    settings: Settings
    bind: str
    coordinator: str
    first_epoch: int
    checkpoint_dir: str
    resume: bool
    again: bool = False
    keeps: bool = True
    secret: str = ""
    parent: str = ""
    parent_timeout: float = 30.0
    keys: str = ""
    parent_key: str = ""
    seals: float = 0.0
    replay: bool = False
    done: tuple[int, ...] = ()
    replicas: int = 0
    follows: str = ""
    host: str = ""
    watched: bool = False
    trace: int = 0
    away: tuple[tuple[int, str], ...] = ()
    shared_memory: bool = True
    one_port: str = ""
    store: str = ""
    relay: str = ""
    relay_secret: str = ""
    via: str = ""
    claim: str = ""
    round_trip: float = 0.0
    journal: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            kinds, value = TYPES.get(str(each.type)), getattr(self, each.name)
            if kinds is not None and type(value) not in kinds:
                raise LocalProtocolError(f"the config of a shard has {each.name} = {value!r}, which is no {each.type}")

    def front(self, port: int) -> str:
        """Return the address that peers dial, as it is bound: the one port, else the port that this process has bound."""
        return self.one_port or f"{self.bind.rpartition(':')[0]}:{port}"

    @property
    def beside(self) -> str | None:
        """The Unix socket of this process, as `Sockets.listen` takes it: behind one port, the one beside that port."""
        if not self.one_port:
            return None
        host, port = parse_address("--one-port", self.one_port)
        return local_endpoint(port, self.index) if host in (*ANY_HOSTS, *LOCAL_HOSTS) else ""

    @property
    def folder(self) -> Path | None:
        """The folder of checkpoints, None: there is none."""
        return Path(self.checkpoint_dir) if self.checkpoint_dir else None

    @property
    def kept_at(self) -> str:
        """The value of --checkpoint-dir: the address, or the folder."""
        return self.store or self.checkpoint_dir

    def copy(self, prefix: str = "", alive: Callable[[], object] = str) -> FolderCopy:
        """Return the other place of the folder's files; `prefix` and `alive` as in `StoreCopy` and `FileStore`."""
        return StoreCopy(FileStore(self.store, alive=alive), prefix) if self.store else NO_COPY

    def of_standby(self, primary: Mapping[str, Any]) -> ServerConfig:
        """Return the config with the fields that a standby takes from its primary's answer (`introduction`)."""
        return replace(self, **{name: primary[name] for name in (*OF_PRIMARY, "parent") if name in primary})

    def encode(self) -> str:
        """Return the config as a line of JSON, without the journal."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "journal"})

    @staticmethod
    def decode(line: str | bytes, env: Mapping[str, str]) -> ServerConfig:
        """Read the line that `encode` made.

        Args:
            line: the line.
            env: the environment of this process, which names the journal's descriptors.

        Raises:
            LocalProtocolError: a field is missing, unknown or not of its type. ps-serve and its shards are of one
                release, so this is a bug.
        """
        try:
            record = json.loads(line)
            record["settings"] = Settings(**record["settings"])
            record["done"] = tuple(record["done"])
            record["away"] = tuple((shard, host) for shard, host in record["away"])
            files = tuple(int(env[name]) for name in JOURNAL if env.get(name))
            return ServerConfig(journal=files or None, **record)
        except (KeyError, TypeError, ValueError) as error:
            raise LocalProtocolError(f"the config of a shard cannot be read: {error}") from None
