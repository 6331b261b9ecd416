"""Finds tied parameters that the cut into stages has separated: two stages of a pipeline begin with the same values.

How it works
1. With the first tensor of a schedule, the stages send each other digests of their parameters.
2. A parameter of another stage with the same digest is tied, or was drawn from the same seed. Each stage has a server
   of its own, so tied parameters would train apart. The stage that finds one ends with an error.
3. Constant tensors are left out: biases begin at 0 and norms at 1 in every stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256

import torch

from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer

TAG = (1 << 40) + 1  # above any tag of a script
DIGEST = 16  # hex digits of a digest


def digests(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return, by name, a digest of dtype, shape and bytes of each parameter that is not constant."""
    found = {}
    for name, parameter in parameters:
        flat = parameter.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel() > 1 and not bool((flat == flat[0]).all()):
            head = f"{parameter.dtype} {tuple(parameter.shape)}".encode()
            found[name] = sha256(head + bytes(flat.view(torch.uint8).numpy().data)).hexdigest()[:DIGEST]
    return found


def packed(found: Mapping[str, str]) -> bytes:
    """Return the payload that carries digests to another stage."""
    return json.dumps(found).encode()


def compare(ours: Mapping[str, str], stage: int, payload: Buffer, other: int) -> None:
    """Compare the parameters of this stage with those of stage `other`.

    Args:
        ours: the digests of this stage, by name.
        stage: the number of this stage.
        payload: the packed digests of the other stage.
        other: the number of the other stage.

    Raises:
        UsageError: both stages have a parameter with the same values.
        RemoteProtocolError: the payload is malformed.
    """
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
