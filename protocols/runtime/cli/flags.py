"""The flags of a run, for ps-serve and for the server that ps-worker embeds. Each has a variable NARROWS_<FLAG>.

How it works
1. `RUN_FLAGS` has a row for each flag. `run_flags` makes click options of them, for both commands.
2. `given` picks the flags that the user gave. `Settings` (protocols/config/settings.py) checks their values.
3. A Python call with keywords goes through `as_given`; `words` makes a command line of flags.
4. `run` ends both commands: an error becomes one sentence on stderr and an exit code.
"""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, NoReturn

import click

from narrows.protocols.addresses import located
from narrows.protocols.config.modes import MODES
from narrows.protocols.config.settings import NOT_GIVEN, Settings
from narrows.protocols.config.topology import RANDOM, TOPOLOGIES, TOPOLOGY
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.runtime.cli import output

# Settings of glibc's allocator in processes that ps-serve and ps-worker start, unless the user sets them. Messages of a
# few MiB come and go at every step. Giving their pages back to the kernel each time costs more than copying them.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(512 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

COMMAND: dict[str, Any] = {"auto_envvar_prefix": "NARROWS", "max_content_width": 120}  # click's context_settings

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # of a disk or terminal that takes no data

DASHBOARD = "127.0.0.1:5550"

# name in Settings, type, default shown, help
RUN_FLAGS: tuple[tuple[str, Any, str, str], ...] = (
    ("shards", int, "1", "server processes, each with one part of the model"),
    (
        "cut",
        str,
        "values",
        "borders of shards: values (even), or tensors (whole ones: servers can step Muon, LAMB and LARS)",
    ),
    ("workers", int, "1", "workers that the run needs to start; also the script's world_size()"),
    ("sync", str, "ssp", f"sync mode: {', '.join(MODES)}"),
    ("staleness", int, "1 for ssp and gossip, 0 for local", "staleness bound S, in clocks"),
    (
        "local_steps",
        int,
        "10",
        "inner steps between two pushes (local, gossip [1]); with --local-seconds at most so many",
    ),
    (
        "local_seconds",
        float,
        "none",
        "seconds of a round: each worker makes as many steps as it can, and weighs by them (local)",
    ),
    ("weigh", str, "samples", "weights of updates in their mean: samples (steps with --local-seconds), or equal"),
    ("fragments", int, "1", "parts of the model that are exchanged in turn, one every H/F inner steps (local)"),
    ("merge_delay", int, "0; 1 with --fragments", "inner steps from a push until its answer is merged (local)"),
    ("merge_alpha", float, "0; 0.5 with a delay", "weight of the worker's own values in a merge (local)"),
    ("push", str, "bsp: gradient, else update", "kind of a push: gradient or update"),
    (
        "outer",
        str,
        "nesterov",
        "outer step: nesterov, or iso: equal singular values of each matrix; needs --cut tensors (local)",
    ),
    (
        "outer_lr",
        float,
        "0.7; 1 without momentum; iso: 1.8",
        "rate of the outer optimizer (local, gossip); 1 with momentum 0 is local SGD",
    ),
    (
        "outer_momentum",
        float,
        "0.6; 0 below 16 local steps; iso: 0.8",
        "Nesterov momentum of the outer optimizer (local, gossip)",
    ),
    ("update_gain", float, "measured", "factor on the mean of updates; 1: a plain mean (ssp, async, bsp, gossip)"),
    (
        "look_ahead",
        float,
        "0.5 with a bound, 0 under SGD",
        "clocks that a worker computes ahead of the folded state (ssp)",
    ),
    (
        "max_update_norm",
        float,
        "no limit",
        "shorten an update whose norm exceeds this many times the recent median, e.g. 5",
    ),
    (
        "robust",
        str,
        "a mean",
        "defence against lying workers: cosine (drops them), trim:SHARE or median (fold robustly)",
    ),
    ("dp_clip", float, "no clipping", "L2 norm to which each worker clips its pushes, over all shards"),
    ("dp_noise", float, "none", "noise that each worker adds, as a multiple of --dp-clip; the record has epsilon"),
    (
        "quorum",
        int,
        "all live workers",
        "pushes that close a round once --grace is over; later updates join the next round (local)",
    ),
    (
        "grace",
        float,
        "adaptive: a quarter of a round",
        "seconds that a round waits for the other workers after --quorum pushes",
    ),
    ("compress", str, "dense", "SPEC that codes pushes, e.g. topk:0.01+int8; auto: chosen for the link"),
    ("compress_down", str, "as --compress; bsp, gossip: dense", "SPEC that codes published states"),
    (
        "topology",
        str,
        TOPOLOGY,
        f"pairs of workers that mix in a round (gossip): {', '.join(TOPOLOGIES)}, or {RANDOM}, without waits",
    ),
    ("lease", float, "10", "seconds of silence after which a worker counts as dead; at least three of its steps"),
    (
        "checkpoint_every",
        float,
        "adaptive: 2 % of the run",
        "seconds between two checkpoints; 0: only at the end and on Ctrl-C",
    ),
    (
        "checkpoint_clocks",
        int,
        "by time",
        "clocks between two checkpoints, for a run that trains one stage of a model",
    ),
    (
        "replan",
        str,
        "say",
        "if another mode or SPEC would be 20 % faster: off, say (print it), or change (switch while training)",
    ),
    ("replan_after", float, "300", "seconds for which that gain must last without a break"),
    (
        "start_steps",
        int,
        "none",
        "first steps that are bsp with gradients; then workers take over the servers' optimizer state, and --sync holds",
    ),
    ("start_compress", str, "dense", "SPEC that codes these gradients, e.g. int4"),
    ("name", str, "none", "name of the run: its server refuses workers and clusters that name another run, or none"),
)


def run_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add every run flag to a click command. A flag that the user does not give arrives as None."""
    for name, kind, default, text in reversed(RUN_FLAGS):
        flag = "--" + name.replace("_", "-")
        function = click.option(flag, name, type=kind, default=None, help=f"{text} [{default}]")(function)
    return function


dashboard_flag: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--dashboard",
    default="",
    metavar="[HOST:]PORT",
    help=f"serve a page of the run; without an address: at {DASHBOARD}; beyond loopback anyone can read it [off]",
)


def glance_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --dashboard and --metrics to a click command. A flag that the user does not give arrives as ""."""
    text = "serve figures of the run for Prometheus, without HOST on loopback; beyond loopback as --dashboard [off]"
    return dashboard_flag(click.option("--metrics", default="", metavar="[HOST:]PORT", help=text)(function))


class Place(click.ParamType):  # type: ignore[type-arg]  # an older click has none
    """The value of a flag that names a folder or a file: a path, or an address in an object store."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        named = param.opts[0] if isinstance(param, click.Option) else ""
        return located(named, value) if named else located("", value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "PLACE"


PLACE = Place()


class Bare(click.Command):
    """A command whose --dashboard may stand without a value, before words that are not an address."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        takes = {
            name for each in self.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        index = 0
        while index < len(args) and args[index].startswith("-"):
            alone = index + 1 == len(args) or not re.fullmatch(r"(\S*:)?\d+", args[index + 1])
            if args[index] == "--dashboard" and alone:
                args[index] = f"--dashboard={DASHBOARD}"
            index += 2 if args[index] in takes else 1
        return super().parse_args(context, args)


class BareGroup(Bare, click.Group):
    """The same for a command with subcommands."""


def words(values: Mapping[str, Any]) -> list[str]:
    """Return the words of these flags on a command line. None: leave out; True and False: --NAME and --no-NAME."""
    found = list[str]()
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found


def as_given(values: Mapping[str, Any], switches: Collection[str] = ()) -> dict[str, Any]:
    """Return the keywords of a function that are not None, each converted as its run flag converts it.

    Args:
        values: the keywords.
        switches: names of further flags, which are True or False.

    Raises:
        UsageError: no flag has this name, or the flag does not take this value.
    """
    kinds = {name: kind for name, kind, *_ in RUN_FLAGS}
    found = dict[str, Any]()
    for name, value in values.items():
        if name not in kinds and name not in switches:
            like = difflib.get_close_matches(name, [*kinds, *switches], 1)
            raise UsageError(f"{name}: ps-serve has no such flag of a run" + (f"; {like[0]} is one" if like else ""))
        if value is None:
            continue
        if isinstance(value, bool) == (name in kinds):
            raise UsageError(f"{name}={value!r}: " + ("give a value" if name in kinds else "give True or False"))
        try:
            found[name] = (
                click.types.convert_type(kinds[name]).convert(str(value), None, None) if name in kinds else value
            )
        except click.BadParameter as error:
            raise UsageError(f"{name}={value!r}: {error.message}") from None
    return found


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the run flags that the user gave.

    Raises:
        UsageError: the user gave -1 to a flag for which Settings uses -1 as "not given": the run would silently take
            the default.
    """
    unset = {field.name for field in fields(Settings) if field.default == NOT_GIVEN}
    found = {name: values[name] for name, *_ in RUN_FLAGS if values.get(name) is not None}
    for name in sorted(unset & found.keys()):
        if found[name] == NOT_GIVEN:
            raise UsageError(
                f"--{name.replace('_', '-')} {found[name]}: give a value that is not negative, or leave it out"
            )
    return found


def run(command: click.Command, name: str) -> NoReturn:
    """Parse the command line, run `command`, and exit with the code that it returns or that its error has."""
    text = ""
    output.open_standard_descriptors()
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except click.Abort:
        code = 130
    except click.ClickException as error:
        code, text = UsageError.exit_code, error.format_message()
    except NarrowsError as error:
        code, text = error.exit_code, str(error)
    except BrokenPipeError:  # `ps-serve keys list | head`
        code = 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        code, text = 1, f"{error.filename or 'stdout'}: {error.strerror}"
    if text:
        output.STDERR.line(f"{name}: {text}")
    output.end()
    sys.exit(code)
