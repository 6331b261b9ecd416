"""Finds parameters that two stages of a pipeline begin with alike: a tie that the cut has parted.

How it works
1. The stages tell each other digests of their parameters with the first tensor of a schedule.
2. A parameter of another stage with the same digest is tied, or was drawn from the same seed. Each stage has a server of its
   own, so tied parameters would train apart. The stage that finds one ends with a sentence.
3. Constants do not count: biases begin at 0 and norms at 1 everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256

import torch

from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer

TAG = (1 << 40) + 1  # no script has it
DIGEST = 16  # hex digits


def digests(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digest of each parameter by its name: of dtype, shape and bytes. Constants have none."""
    found = {}
    for name, parameter in parameters:
        flat = parameter.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel() > 1 and not bool((flat == flat[0]).all()):
            told = f"{parameter.dtype} {tuple(parameter.shape)}".encode()
            found[name] = sha256(told + bytes(flat.view(torch.uint8).numpy().data)).hexdigest()[:DIGEST]
    return found


def packed(found: Mapping[str, str]) -> bytes:
    return json.dumps(found).encode()


def compare(ours: Mapping[str, str], stage: int, payload: Buffer, other: int) -> None:
    """Raises UsageError where stage `other` has a parameter of `stage`, which has `ours`."""
    try:
        theirs = {str(digest): str(name) for name, digest in json.loads(bytes(payload)).items()}
    except (ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"the digests of stage {other} are not readable: {error}") from None
    for name, digest in ours.items():
        if digest in theirs:
            raise UsageError(
                f"{name} of stage {stage} and {theirs[digest]} of stage {other} begin with the same values: tied parameters of "
                "two stages train apart. Keep both in one stage; if they are no tie, draw others, as "
                "torch.manual_seed(stage()) does; pipeline(keeps_ties=True) says that the script keeps them equal itself"
            )
