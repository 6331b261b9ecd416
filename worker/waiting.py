"""What the link of an engine delivers, handled while it waits. The main thread owns it.

Rules
- All ranks of a group wait for the same things in the same order, and none goes on before all can.
- What is of the whole run, such as a new place in it or a move of keys, they handle at the same point, between two agreements.
  What is of a shard each handles as it comes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError
from narrows.worker.group import Group
from narrows.worker.hub import OF_SHARD
from narrows.worker.runner import Link

HEARD_LIMIT_S = 60.0  # what one rank has heard all have heard within this
ENDED_S = 2.0  # another rank has ended: why that was is told within this


class Waiting:
    """`handle`: takes each event. missing: asked at each agreement; `missed` is the least that a rank has answered."""

    def __init__(self, link: Link, group: Group | None, handle: Callable[[MemberEffect], None]) -> None:
        self.link, self.group, self.handle = link, group, handle
        self.missing: Callable[[], int] = lambda: 0
        self.missed = 0
        self._of_run: deque[MemberEffect] = deque()  # not handled yet
        self._heard = 0  # of these, so far

    def until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Handle events until `done`, on all ranks of a group. Raises NarrowsError after `limit_s`, and the error that ended
        the session."""
        began = time.monotonic()
        while True:
            while not done() and not self._of_run:
                left = began + limit_s - time.monotonic()
                if left <= 0:
                    raise NarrowsError(f"waited {limit_s:.0f} s for {what}")
                self._take(min(left, 1.0))
            if self._agreed(done()):
                break

    def poll(self) -> None:
        """Handle what has arrived, without waiting; what is of the run once the ranks agree."""
        while self._take(0.0):
            pass

    def agree(self) -> None:
        """Handle what any rank of a group has heard of the run."""
        self._agreed(True)

    def alone(self) -> None:
        """The group is over: nobody waits for another rank any more."""
        self.group = None
        while self._of_run:
            self.handle(self._of_run.popleft())

    def _take(self, timeout_s: float) -> bool:
        """Whether there was an event."""
        event = self.link.take(timeout_s)
        if event is None:
            return False
        if self.group is None or isinstance(event, OF_SHARD):
            self.handle(event)
        else:
            self._heard += 1
            self._of_run.append(event)
        return True

    def _agreed(self, done: bool) -> bool:
        """Whether all ranks of a group are done, and none has heard anything of the run. Else all have handled it now."""
        if self.group is None:
            return done
        all_done, least, self.missed = self._together(lambda group: group.least(done, -self._heard, self.missing()))
        newest, deadline = -least, time.monotonic() + HEARD_LIMIT_S
        while self._heard < newest:  # it is on its way to us
            if not self._take(1.0) and time.monotonic() > deadline:
                raise NarrowsError(f"the first process of this group has said nothing for {HEARD_LIMIT_S:.0f} s")
        coming = len(self._of_run) - (self._heard - newest)
        for _ in range(coming):
            self.handle(self._of_run.popleft())
        return bool(all_done) and not coming

    def _together(self, work: Callable[[Group], Any]) -> Any:
        """What the ranks of a group do together. Raises what ended the session, rather than that another rank ended of it."""
        assert self.group is not None
        try:
            return work(self.group)
        except NarrowsError:
            deadline = time.monotonic() + ENDED_S
            while time.monotonic() < deadline:
                self.link.take(ENDED_S)
            raise
