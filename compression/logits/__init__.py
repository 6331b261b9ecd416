"""narrows.compression.logits: codes the answers of a teacher, the top K log-probabilities of each token with their ids.

    coding = parse_logits("top:32+int8")
    records = coding.encode(log_probs, ids, classes)      # the teacher: float32[tokens, 32] to uint8[tokens, bytes]
    payload = coding.pack(records, classes)
    records = coding.open(payload, classes, tokens)       # the student: checked
    log_probs, ids = coding.decode(records, classes)

A student in one city learns from a teacher in another by such answers (Nebula-I, 2205.09470). This folder has the coding
alone, and no network. docs/logits.md has the format, its sizes and its errors.
"""

from collections.abc import Callable

import numpy as np

from narrows.compression.kernels.jit import compilations
from narrows.compression.logits.coding import LogitCoding, parse_logits
from narrows.compression.logits.layout import VALUE_CODINGS

__all__ = ["LogitCoding", "parse_logits", "warm_up"]


def warm_up(say: Callable[[str], None] = lambda text: None) -> None:
    """Compile the kernels of this folder, or load them from the cache on disk. Call this before the first answer is due.

    `make install` compiles them, in some eight seconds. Loading them takes less than one.

    Args:
        say: called with one line before a compilation begins, and one after the last has ended.
    """
    with compilations(say):
        log_probs, ids = np.full((1, 2), -1.0, np.float32), np.arange(2)[None]
        for coding in map(parse_logits, (f"top:2+{name}" for name in VALUE_CODINGS)):
            coding.decode(coding.encode(log_probs, ids, 3), 3)
