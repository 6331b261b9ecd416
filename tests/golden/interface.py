"""Part of the golden record: what users write. Flags of the commands, and the names that narrows.worker exports, with their
arguments. Help texts are prose, and are not recorded."""

from __future__ import annotations

import inspect
from enum import Enum
from functools import partial
from typing import Any

import click

from golden.digests import Entries
from narrows import worker
from narrows.protocols.messages import RefuseCode
from narrows.ps.command.cli import command as ps_serve
from narrows.ps.command.planning.plan import command as ps_plan
from narrows.ps.command.planning.probe import command as ps_probe
from narrows.ps.command.plot import command as ps_plot
from narrows.ps.command.top import command as ps_top
from narrows.worker.command.cli import command as ps_worker
from narrows.worker.command.teach import command as ps_teach

COMMANDS = {
    "ps-serve": ps_serve,
    "ps-worker": ps_worker,
    "ps-teach": ps_teach,
    "ps-top": ps_top,
    "ps-plot": ps_plot,
    "ps-probe": ps_probe,
    "ps-plan": ps_plan,
}
STARS = {int(inspect.Parameter.VAR_POSITIONAL): "*", int(inspect.Parameter.VAR_KEYWORD): "**"}
CALLED = (worker.DistributedOptimizer, worker.sampler)


def interface_part() -> Entries:
    found = {"exit codes": " ".join(str(int(code)) for code in RefuseCode), "exports": " ".join(sorted(worker.__all__))}
    for name, command in COMMANDS.items():
        found |= _flags(name, command)
    for name in sorted(worker.__all__):
        found |= _exported(f"narrows.worker.{name}", getattr(worker, name))
    return {name: partial(str, text) for name, text in found.items()}


def _flags(name: str, command: Any) -> dict[str, str]:
    """Of each flag and argument of a command, and of its subcommands, what it takes."""
    found = {f"{name} {'/'.join(each.opts) or each.name}": _taken(each) for each in command.params}
    for below, each in sorted(command.commands.items()) if isinstance(command, click.Group) else ():
        found |= _flags(f"{name} {below}", each)
    return found


def _taken(param: click.Parameter) -> str:
    kind = param.type
    choices = "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else ""
    limits = f"{kind.min}..{kind.max}" if isinstance(kind, (click.IntRange, click.FloatRange)) else ""
    more = [word for word in ("required", "is_flag", "multiple", "hidden") if getattr(param, word, False)]
    # What a flag has as its default, and one without a default, depends on the version of click.
    if not {"required", "is_flag"} & {*more} and (default := _value(param.default)) not in ("-", "None"):
        more.append(f"default {default}")
    return " ".join(filter(None, (kind.name, choices, limits, *more)))


def _value(value: Any) -> str:
    """A default as text, where it is a plain value."""
    value = value.value if isinstance(value, Enum) else value
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else "-"


def _exported(name: str, what: Any) -> dict[str, str]:
    """The arguments of a function, or of a class; and its public methods, where scripts call them."""
    found = {name: _arguments(what)}
    for each, method in sorted(vars(what).items()) if what in CALLED else ():
        if not each.startswith("_"):
            found[f"{name}.{each}"] = _arguments(method)
    return found


def _arguments(what: Any) -> str:
    what = what.__func__ if isinstance(what, (classmethod, staticmethod)) else what
    if not callable(what):
        return "a value"
    return ", ".join(
        STARS.get(int(each.kind), "")
        + each.name
        + (" keyword" if each.kind is each.KEYWORD_ONLY else "")
        + (f" = {_value(each.default)}" if each.default is not each.empty else "")
        for each in inspect.signature(what).parameters.values()
    )
