"""The commands of a run that a manager starts, as lists of words, and the filling of templates with them.

A manager may end the commands and start them again: a server resumes from its checkpoints, and a worker with the state
of its optimizer.
"""

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

PORT = 5555  # the port where --bind names none
SCRIPT = ["train.py"]  # the user replaces it
WAIT_S = 300  # a worker waits so long for a server whose machine is still starting
READY = "/tmp/narrows-ready"  # each container has its own /tmp
END_S = 120  # from a manager's warning to its kill; the server writes a checkpoint meanwhile
CHECKPOINT_S = 600  # the same for a manager that waits only as long as needed: 10 GB to a slow disk
VERSION = version("narrows")
IMAGE = f"narrows:{VERSION}"
REGISTRY = "registry.example.com"  # the user replaces it
TEMPLATES = resources.files("narrows.ps.command.managers") / "templates"
# Values for the placeholders of every template.
COMMON = {"end_s": END_S, "image": IMAGE, "ready": READY, "registry": REGISTRY, "script": SCRIPT[0]}
PLACEHOLDER = re.compile(r"^(?P<margin> *)\{\{ (?P<block>\w+) \}\}\n|\{\{ (?P<word>\w+) \}\}", re.M)


@dataclass(frozen=True)
class RunCommands:
    """A server as its flags describe it, and the commands of this server and its workers."""

    host: str  # to bind; "": any
    port: int
    workers: int
    shards: int
    run: Mapping[str, Any]  # the flags of the run that the user has given
    keys: str  # the folder of the keys, "" for none
    resume: bool = True  # the server resumes from its checkpoints
    sites: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # by flag of the dashboard or of metrics
    journal: str = ""  # --journal or --no-journal if the user has given it

    def serve(
        self,
        folder: str,
        run_id: str,
        *more: str,
        run: Mapping[str, Any] | None = None,
        keys: str | None = None,
        inside: bool = False,
    ) -> list[str]:
        """Return the command of the server.

        Args:
            folder: the folder of the checkpoints; this run alone uses it.
            run_id: the name of the run, the same when the manager starts it again.
            more: further words.
            run: flags in the place of those of the run.
            keys: where the folder of keys is mounted; None: at its own path.
            inside: the server runs in a container, where nothing outside reaches a loopback address.
        """
        words = ["ps-serve", "--bind", f"tcp://{self.host or ANY_HOST}:{self.port}"]
        words += flags.words({"workers": self.workers, "shards": self.shards} | dict(self.run) if run is None else run)
        words += ["--keys", self.keys if keys is None else keys] if self.keys else [] if self.host else ["--insecure"]
        words += [f"{flag}={ANY_HOST if inside else host}:{port}" for flag, (host, port) in self.sites.items()]
        words += [self.journal] if self.journal else []
        again = ["--resume", "--run-id", run_id] if self.resume else []
        return [*words, "--checkpoint-dir", folder, *again, *more]

    @property
    def named(self) -> list[str]:
        """The words of the run's name, for every command that joins it."""
        return flags.words({"name": self.run.get("name")})

    def work(
        self,
        server: str,
        folder: str,
        *more: str,
        script: list[str] = SCRIPT,
        keys: str | None = None,
        told: bool = False,
    ) -> list[str]:
        """Return the command of workers.

        Args:
            server: the host of the server, or its address.
            folder: the folder of the optimizers' states; "": the server has the states.
            more: further words.
            script: the script and its arguments.
            keys: where the folder of keys is mounted; None: at its own path.
            told: `server` is an address.
        """
        address = server if told else type(server)(f"tcp://{server}:{self.port}")
        key = ["--key", f"{self.keys if keys is None else keys}/worker.key"] if self.keys else []
        own = ["--checkpoint-dir", folder] if folder else []
        own += ["--connect-timeout", str(WAIT_S), *self.named]
        return ["ps-worker", "--server", address, *key, *own, *more, *script]

    def note(self, add: str = "") -> str:
        """Return a comment of a shell script that tells the user how to make keys. `add` follows the commands."""
        if self.keys:
            name = shlex.quote(self.keys)
            return f"# Keys, once: ps-serve keys init {name} && ps-serve keys add worker --keys {name}{add}"
        return "# Without keys anyone who reaches the port can join. --print with --keys DIR makes a file with keys."


class ShellWord(str):
    """A word with variables that a shell or Kubernetes replaces. Other words stay as the user gave them."""


def shell(words: list[str]) -> str:
    """Return the words as one line of sh."""
    return " ".join(f'"{word}"' if isinstance(word, ShellWord) else shlex.quote(word) for word in words)


def listed(words: list[str], variables: str = "") -> str:
    """Return the words as a list of YAML.

    Args:
        words: the words.
        variables: the characters with which the file's reader begins a variable. They are escaped in all words but
            `ShellWord`.
    """
    if not variables:
        return json.dumps(words)
    return json.dumps(
        [word if isinstance(word, ShellWord) else word.replace(variables, "$" + variables) for word in words]
    )


def filled(template: str, **values: object) -> str:
    """Fill a template.

    `{{ name }}` within a line stands for a value. On a line of its own it stands for a block: each line of the value
    gets the margin of the placeholder, and an empty value takes the line away. Values are not searched for
    placeholders.

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
