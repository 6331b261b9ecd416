"""The two cities of ps-serve --print compose, without a container engine: each service is a process in namespaces of its own.

A network of the file is a bridge. A service's name is in /etc/hosts. Its volume is mounted where it finds it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kit.processes import LIMIT_S, SCRIPT, Command, started, until
from lab import netns
from safetensors.torch import load_file

from narrows.ps.command import cli as serve
from narrows.ps.command.managers.run_commands import READY

pytestmark = pytest.mark.skipif(bool(netns.available()), reason=netns.available() or "available")

UNSHARE = shutil.which("unshare") or ""
# An engine gives a container its names and its volume. Its /tmp has another name, for our own files may be below /tmp.
INSIDE = """
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs none /run
mkdir /run/narrows
mount --bind "$1/run" /run/narrows
echo mounted
exec sleep 600
"""


def wire(hosts: dict[str, netns.Host], networks: dict[str, list[str]], switch: netns.Host) -> dict[str, dict[str, str]]:
    """Join the hosts of each network by a bridge in `switch`. Returns their addresses, by network and service."""
    addresses: dict[str, dict[str, str]] = {}
    for number, (network, members) in enumerate(networks.items()):
        netns.ip("-n", switch.netns, "link", "add", f"br{number}", "type", "bridge")
        netns.ip("-n", switch.netns, "link", "set", f"br{number}", "up")
        for index, name in enumerate(members):
            port, address = f"p{number}x{index}", f"10.78.{number}.{index + 1}"
            pair = ("link", "add", port, "type", "veth", "peer", "name", f"net{number}", "netns", hosts[name].netns)
            netns.ip("-n", switch.netns, *pair)
            netns.ip("-n", switch.netns, "link", "set", port, "master", f"br{number}", "up")
            netns.ip("-n", hosts[name].netns, "address", "add", f"{address}/24", "dev", f"net{number}")
            netns.ip("-n", hosts[name].netns, "link", "set", f"net{number}", "up")
            addresses.setdefault(network, {})[name] = address
    return addresses


def _mounted(container: Command) -> bool:
    return "mounted" in container.out


@contextmanager
def up(text: str, folder: Path, script: str, args: list[str]) -> Iterator[dict[str, Command]]:
    """Start what `docker compose up` starts, in its order."""
    document = yaml.safe_load(text)
    services: dict[str, dict[str, Any]] = document["services"]
    networks = {net: [name for name in services if net in services[name]["networks"]] for net in document["networks"]}
    with netns.Lab() as network, ExitStack() as stack:
        hosts = {name: network.host() for name in services}
        addresses = wire(hosts, networks, network.host())
        commands: dict[str, Command] = {}
        for name, service in services.items():
            own = folder / name
            for each in ("run", "tmp"):
                (own / each).mkdir(parents=True)
            (own / "tmp" / "train.py").write_text(script)
            known = {other: where for net in service["networks"] for other, where in addresses[net].items()}
            (own / "hosts").write_text(
                "".join(f"{at} {who}\n" for who, at in {**known, "localhost": "127.0.0.1"}.items())
            )
            for other, wanted in service.get("depends_on", {}).items():
                assert wanted == {"condition": "service_healthy"} and READY in services[other]["healthcheck"]["test"]
                ready = folder / other / "tmp" / Path(READY).name
                until(ready.exists, f"{other} to be healthy", 2 * LIMIT_S)
            told = [word.replace(READY, str(own / "tmp" / Path(READY).name)) for word in service["command"]]
            told = [word.replace("${RUN_ID:-first}", "first") for word in told]
            told += args if told[-1] == "train.py" else []
            mounts = (UNSHARE, "--mount", "sh", "-e", "-c", INSIDE, "inside", str(own))
            with hosts[name].inside():
                container = stack.enter_context(started(*mounts))
            until(partial(_mounted, container), container)
            commands[name] = stack.enter_context(started(*told, cwd=own / "tmp", within=container.pid))
        yield commands


@pytest.mark.timeout(300)  # five commands, each after the one before
@pytest.mark.skipif(not UNSHARE, reason="needs unshare (util-linux)")
def test_the_two_cities_of_compose_train_and_end(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--sync", "ssp", "--compress", "topk:0.11+sign", "--bind", "tcp://0.0.0.0:6001"]
    text = CliRunner().invoke(serve.command, ["--print", "compose", *flags], standalone_mode=False).output
    with up(text, tmp_path, SCRIPT % "pass", ["20"]) as commands:
        deadline = time.monotonic() + 2 * LIMIT_S
        codes = {name: command.wait(max(1.0, deadline - time.monotonic())) for name, command in commands.items()}
        said = {name: str(command) for name, command in commands.items()}
    assert codes == dict.fromkeys(commands, 0), said
    assert len(commands) == 5 and load_file(tmp_path / "above" / "run" / "first" / "model.safetensors")[
        "weight"
    ].shape == (2, 4)
    assert all("2 of 2 workers done" in said[f"{city}-workers"] for city in ("leipzig", "jena")), said
