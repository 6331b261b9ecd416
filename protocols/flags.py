"""The flags of a run, once: ps-serve takes them, and ps-worker for the server it embeds. Each has NARROWS_<FLAG>."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from narrows.protocols.modes import MODES

# How glibc is to keep memory in the processes that ps-serve and ps-worker start, unless the user says otherwise: messages
# of a few MiB come and go at every step, and giving their pages back to the kernel each time costs more than copying them.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(512 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

# name in Settings, type, default shown, help
RUN_FLAGS: tuple[tuple[str, Any, str, str], ...] = (
    ("shards", int, "1", "server processes that the model is cut over"),
    ("workers", int, "1", "workers needed to start, and the script's world_size()"),
    ("sync", str, "ssp", f"sync mode: {', '.join(MODES)}"),
    ("staleness", int, "1 for ssp, 0 for local", "staleness bound S, in clocks"),
    ("local_steps", int, "10", "inner steps between two pushes (local)"),
    ("push", str, "bsp: gradient, else update", "what is pushed: gradient or update"),
    ("outer_lr", float, "0.7", "rate of the outer optimizer (local); 1 with momentum 0 is local SGD"),
    ("outer_momentum", float, "0.9", "Nesterov momentum of the outer optimizer (local)"),
    ("compress", str, "dense", "what pushes are coded with, e.g. topk:0.01+int8"),
    ("compress_down", str, "as --compress; bsp: dense", "what published states are coded with"),
    ("lease", float, "10", "seconds of silence after which a worker is taken for dead"),
    ("checkpoint_every", float, "at the end", "seconds between two checkpoints"),
)


def run_flags(skip: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A click decorator that adds every run flag; one that was not given arrives as None."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, kind, default, text in reversed(RUN_FLAGS):
            if name not in skip:
                flag = "--" + name.replace("_", "-")
                help_text = f"{text} [{default}]"
                envvar = f"NARROWS_{name.upper()}"
                function = click.option(flag, name, type=kind, default=None, help=help_text, envvar=envvar)(function)
        return function

    return decorate


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that are run flags and were given."""
    names = {name for name, *_ in RUN_FLAGS}
    return {name: value for name, value in values.items() if name in names and value is not None}
