"""The seed of all random numbers of tests; NARROWS_TEST_SEED replays a run."""

from __future__ import annotations

import os
import random

SEED = int(os.environ.get("NARROWS_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
