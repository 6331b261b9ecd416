"""The file plan.json, and the host of the plan that is this machine."""

from __future__ import annotations

import socket
from pathlib import Path

from narrows.protocols.config.deployment import Deployment, parse
from narrows.protocols.errors import UsageError


def read(file: str) -> Deployment:
    """Read a plan. Raises UsageError, one sentence that names the fault."""
    try:
        return parse(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None


def this_host(layout: Deployment, host: str) -> str:
    """Return the plan's name of this machine: `host` (--host), or the hostname.

    Raises:
        UsageError: the plan has no such host.
    """
    name = host or socket.gethostname()
    layout.known(name)
    return name


def key_file(path: str, flag: str) -> str:
    """Return the file of a key of a plan: `path`, where `ps-serve keys add` made it, or its name in this folder.

    Raises:
        UsageError: neither file exists.
    """
    given = Path(path)
    for each in (given, Path(given.name)):
        if each.exists():
            return str(each)
    raise UsageError(
        f"{flag}: neither {path} nor {given.name} is here; ps-serve keys add made it where its server is: hand it over"
    )
