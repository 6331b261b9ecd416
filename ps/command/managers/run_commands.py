"""The commands of a run that a manager starts, as lists of words, and the filler of the files that have them. A server goes on
from its checkpoints, and a worker with the state of its optimizer: a manager may end them and start them again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import version
from textwrap import indent
from typing import Any

from narrows.protocols.addresses import ANY_HOST
from narrows.protocols.runtime.cli import flags

PORT = 5555  # where --bind names none
SCRIPT = ["train.py"]  # to be replaced by the user
WAIT_S = 300  # that a worker waits for a server whose machine is still being started
READY = "/tmp/narrows-ready"  # in a container of its own
END_S = 120  # from a manager's warning to its kill: a checkpoint is written meanwhile
CHECKPOINT_S = 600  # the same, where a manager waits no longer than it takes: 10 GB to a slow disk
VERSION = version("narrows")
IMAGE = f"narrows:{VERSION}"
REGISTRY = "registry.example.com"  # to be replaced by the user
TEMPLATES = resources.files("narrows.ps.command.managers") / "templates"
# Values that every template may name.
COMMON = {"end_s": END_S, "image": IMAGE, "ready": READY, "registry": REGISTRY, "script": SCRIPT[0]}
PLACEHOLDER = re.compile(r"^(?P<margin> *)\{\{ (?P<block>\w+) \}\}\n|\{\{ (?P<word>\w+) \}\}", re.M)


@dataclass(frozen=True)
class RunCommands:
    """A server as its flags describe it. `host`: "" is any. `run`: the flags of the run that were given. `keys`: the
    folder, "" without. `resume`: the server has a model to go on from. `sites`: (host, port) of each flag of a page or of
    metrics. `journal`: "", or the flag as it was given."""

    host: str
    port: int
    workers: int
    shards: int
    run: Mapping[str, Any]
    keys: str
    resume: bool = True
    sites: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    journal: str = ""

    def serve(
        self,
        folder: str,
        run_id: str,
        *more: str,
        run: Mapping[str, Any] | None = None,
        keys: str | None = None,
        inside: bool = False,
    ) -> list[str]:
        """A server that goes on from `folder`, which this run has for itself: `run_id` names the run, also where the manager
        starts it again. `run`: instead of these flags. `keys`: where the folder is mounted. `inside`:
        in a container, of which others reach no loopback."""
        words = ["ps-serve", "--bind", f"tcp://{self.host or ANY_HOST}:{self.port}"]
        words += flags.words({"workers": self.workers, "shards": self.shards} | dict(self.run) if run is None else run)
        words += ["--keys", self.keys if keys is None else keys] if self.keys else [] if self.host else ["--insecure"]
        words += [f"{flag}={ANY_HOST if inside else host}:{port}" for flag, (host, port) in self.sites.items()]
        words += [self.journal] if self.journal else []
        again = ["--resume", "--run-id", run_id] if self.resume else []
        return [*words, "--checkpoint-dir", folder, *again, *more]

    def work(
        self,
        server: str,
        folder: str,
        *more: str,
        script: list[str] = SCRIPT,
        keys: str | None = None,
        told: bool = False,
    ) -> list[str]:
        """Workers of the server at this host, which keep their optimizers' states in `folder`; "": the server has them. `told`:
        `server` is a whole address."""
        address = server if told else type(server)(f"tcp://{server}:{self.port}")
        key = ["--key", f"{self.keys if keys is None else keys}/worker.key"] if self.keys else []
        own = ["--checkpoint-dir", folder] if folder else []
        own += ["--connect-timeout", str(WAIT_S)]
        return ["ps-worker", "--server", address, *key, *own, *more, *script]

    def note(self, add: str = "") -> str:
        """Say what the user does about keys, as a comment of a shell script."""
        if self.keys:
            name = shlex.quote(self.keys)
            return f"# Keys, once: ps-serve keys init {name} && ps-serve keys add worker --keys {name}{add}"
        return "# Without keys anyone who reaches the port can join. --print with --keys DIR makes a file with keys."


class ShellWord(str):
    """A word of ours with variables, which a shell or Kubernetes replaces. Words that a user gave stay as they are."""


def shell(words: list[str]) -> str:
    """One line of sh."""
    return " ".join(f'"{word}"' if isinstance(word, ShellWord) else shlex.quote(word) for word in words)


def listed(words: list[str], variables: str = "") -> str:
    """A list of YAML. `variables`: how the reader of the file begins a variable, which a word of a user has none of."""
    if not variables:
        return json.dumps(words)
    return json.dumps(
        [word if isinstance(word, ShellWord) else word.replace(variables, "$" + variables) for word in words]
    )


def filled(template: str, **values: object) -> str:
    """Fill a template.

    `{{ name }}` within a line stands for a value. On a line of its own it stands for a block: each line of the value gets the
    margin of the placeholder, and an empty value takes the line away. Values are not searched for placeholders.

    Args:
        template: the name of a file in templates/, without its ending.
        values: one for each placeholder that COMMON lacks, and instead of those that it has.

    Raises:
        KeyError: a placeholder has no value.
    """
    known = COMMON | values

    def value(found: re.Match[str]) -> str:
        if word := found["word"]:
            return str(known[word])
        block = str(known[found["block"]]).rstrip("\n")
        return indent(block, found["margin"]) + "\n" if block else ""

    return PLACEHOLDER.sub(value, (TEMPLATES / f"{template}.template").read_text("utf-8"))
