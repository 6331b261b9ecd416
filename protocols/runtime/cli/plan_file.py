"""plan.json on disk, and which host of it this machine is."""

from __future__ import annotations

import socket
from pathlib import Path

from narrows.protocols.config.deployment import Deployment, parse
from narrows.protocols.errors import UsageError


def read(file: str) -> Deployment:
    """Raises UsageError, one sentence that names what is wrong."""
    try:
        return parse(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None


def this_host(layout: Deployment, host: str) -> str:
    """The name in the plan of this machine: what --host says, or its hostname. Raises UsageError where the plan lacks it."""
    name = host or socket.gethostname()
    layout.known(name)
    return name


def key_file(path: str, flag: str) -> str:
    """The file of a key of a plan: where `ps-serve keys add` has made it, or its name in this folder. Raises UsageError."""
    given = Path(path)
    for each in (given, Path(given.name)):
        if each.exists():
            return str(each)
    raise UsageError(
        f"{flag}: neither {path} nor {given.name} is here; ps-serve keys add made it where its server is: hand it over"
    )
