"""One link of the network lab: a process of link.c, which says what rate, queue, jitter and loss mean exactly.

Compiled on first use; it ends with its stdin, so with this process.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab import launch
from lab.launch import CommandFailed

SOURCE = Path(__file__).with_name("link.c")
COMPILE = ("cc", "-std=c17", "-O2", "-Wall", "-Wextra")
MTU = 1500
RATE_MAX, DELAY_S_MAX, QUEUE_BYTES_MAX = 10e9, 10.0, 256 << 20  # link.c's own
QUEUE_BYTES_MIN = 32 << 10  # two initial windows of TCP, of ten full packets each
QUEUE_S_MIN = 0.01  # a busy machine wakes a link late; what has come meanwhile comes at once and must find room
COMMAND_S = 60.0  # for what takes milliseconds, or a second for the compiler
GONE_S = 10.0  # after SIGKILL


@dataclass(frozen=True)
class Way:
    """One direction of a link."""

    rate: float  # bit/s of IP packets; 0: cut
    delay_s: float = 0.0
    jitter_s: float = 0.0  # up to so much more or less delay, in order all the same
    loss: float = 0.0  # share of the packets
    queue_bytes: int = 0  # 0: rate times round trip, which is what one stream needs to fill the link; see `queue`

    def __post_init__(self) -> None:
        times = 0 <= self.jitter_s <= self.delay_s <= DELAY_S_MAX
        queue = self.queue_bytes == 0 or MTU <= self.queue_bytes <= QUEUE_BYTES_MAX
        if not (0 <= self.rate <= RATE_MAX and times and 0 <= self.loss <= 1 and queue):
            raise ValueError(
                f"a link has up to {RATE_MAX:.0e} bit/s, {DELAY_S_MAX:g} s of delay, jitter within the delay, a loss from "
                f"0 to 1 and a queue from {MTU} to {QUEUE_BYTES_MAX} bytes; not {self}"
            )

    @property
    def queue(self) -> int:
        own = max(QUEUE_BYTES_MIN, self.rate / 8 * max(2 * self.delay_s, QUEUE_S_MIN))
        return self.queue_bytes or min(int(own), QUEUE_BYTES_MAX)

    def packed(self) -> str:
        """As link.c reads it."""
        parts = (self.rate, self.delay_s * 1e9, self.jitter_s * 1e9, self.loss * 1e9, self.queue)
        return " ".join(f"{part:.0f}" for part in parts)


class Counts(NamedTuple):
    """The counts of one way so far, as link.c says them."""

    packets: int
    bytes: int
    dropped: int  # by the queue
    lost: int  # at random, or by a cut


class Link:
    """A running link; `there` is its way from the first host to the second, `back` the other."""

    def __init__(self, ends: Sequence[tuple[str, str]], there: Way, back: Way, seed: int) -> None:
        """`ends`: namespace and device, twice. Raises CommandFailed."""
        self._process = subprocess.Popen(
            [str(compiled()), str(seed), *itertools.chain(*ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
            self.set(there, back)
        except BaseException:
            self.close()
            raise

    def set(self, there: Way, back: Way) -> None:
        self.there, self.back = there, back
        self._ask(f"{there.packed()} {back.packed()}")

    def change(self, **settings: Any) -> None:
        """Fields of Way, for both ways, from now on; what is on the line keeps its time."""
        self.set(replace(self.there, **settings), replace(self.back, **settings))

    def cut(self) -> None:
        """Until mend() nothing comes through; what is under way is lost."""
        self._ask(" ".join([replace(self.there, rate=0).packed(), replace(self.back, rate=0).packed()]))

    def mend(self) -> None:
        self.set(self.there, self.back)

    def counts(self) -> tuple[Counts, Counts]:
        """There, back."""
        numbers = [int(word) for word in self._ask("").split()]
        return Counts(*numbers[:4]), Counts(*numbers[4:])

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        process = self._process
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], COMMAND_S)[0]
        if line := process.stdout.readline() if ready else "":
            return line
        process.kill()
        raise CommandFailed(f"a link has ended: {process.communicate()[1].strip() or 'it did not answer'}")

    def close(self) -> None:
        with self._process as process:  # closes the pipes, and waits
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(GONE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def compiled() -> Path:
    """link.c as a program, made when there is none of this very text. Raises CommandFailed."""
    path = launch.OUT / f"link-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        launch.run([*COMPILE, "-o", str(temporary), str(SOURCE)], COMMAND_S)
        os.replace(temporary, path)
    return path
