"""Where a teacher listens, by the flags of ps-teach or its environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from narrows.protocols.addresses import ANY_HOSTS, bracketed, is_loopback, parse_address
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import write_ready
from narrows.worker.runtime.config import OFF

BIND = "tcp://127.0.0.1:5570"  # where a teacher listens without --bind


@dataclass(frozen=True)
class TeacherPlace:
    """Where a teacher listens: the flags of ps-teach.

    Attributes:
        bind: tcp://host:port.
        keys: the folder of its keys, "": connections are not encrypted.
        ready_file: a JSON file that is written once students can ask, "": none.
        record: a file of JSON lines, or an address in a store: who asks, and how much; "": none.
    """

    bind: str
    keys: str
    ready_file: str
    record: str = ""

    @staticmethod
    def of_environment(env: Mapping[str, str] = os.environ) -> TeacherPlace:
        """Read the variables of ps-teach. Raises UsageError: anyone could ask, since there are no keys."""
        bind, keys = env.get("NARROWS_BIND") or BIND, env.get("NARROWS_KEYS", "")
        host, _ = parse_address("--bind", bind, any_port=True)
        insecure = env.get("NARROWS_INSECURE", "").lower() not in ("", *OFF)
        if not (keys or insecure or is_loopback(host)):
            raise UsageError(
                f"--bind {bind}: anyone who reaches it could ask; ps-serve keys init DIR makes keys for --keys DIR, and "
                "--insecure goes without them"
            )
        return TeacherPlace(bind, keys, env.get("NARROWS_READY_FILE", ""), env.get("NARROWS_RECORD", ""))

    def announce(self, port: int, say: Callable[[str], None]) -> None:
        """Say where this teacher listens."""
        host, _ = parse_address("--bind", self.bind, any_port=True)
        named = socket.gethostname() if host in ANY_HOSTS else bracketed(host)
        address = f"tcp://{named}:{port}"
        say(
            f"teaches at {address}; students: ps-worker --teacher {address}{' --teacher-key FILE' if self.keys else ''} ..."
        )
        write_ready(self.ready_file, {"address": address, "ports": [port], "pid": os.getpid()})
