"""Events that the link of an engine delivers, handled while it waits. The main thread owns it.

Rules
- All ranks of a group wait for the same things in the same order, and none goes on before all can.
- A script calls the same on all ranks. Where it does not, the next agreement says so.
- They handle events of the whole run, such as a new place in it or a move of keys, at the same point, between two
  agreements. Each handles events of a shard as they come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.group.group import Group
from narrows.worker.group.group_link import OF_SHARD
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.runtime.member_link import MemberLink

# A script calls these on all ranks at once; the last one also where it ends.
CALLS = (
    "DistributedOptimizer()",
    "ranges()",
    "step()",
    "eval() or shared()",
    "state_dict()",
    "load_state_dict()",
    "finish()",
    "leave()",
    "agree()",
)
HEARD_LIMIT_S = 60.0  # what one rank has heard all have heard within this
SAY_S = 10.0  # from one line about a wait to the next
ENDED_S = 2.0  # another rank has ended: why that was is told within this


class EventWait:
    """`handle`: takes each event. missing: asked at each agreement; `missed` is the least that a rank has answered."""

    def __init__(self, link: MemberLink, group: Group | None, handle: Callable[[MemberEffect], None]) -> None:
        self.link, self.group, self.handle = link, group, handle
        self.missing: Callable[[], int] = lambda: 0
        self.missed = 0
        self._call = 0  # of CALLS, the one that this rank is in
        self._of_run: deque[MemberEffect] = deque()  # not handled yet
        self._heard = 0  # of these, so far

    def calls(self, what: str) -> None:
        """The script has called this; the next agreement of the ranks is about it."""
        self._call = CALLS.index(what)

    def until(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None:
        """Handle events until `done`, on all ranks of a group. Raises NarrowsError after `limit_s`, and the error that ended
        the session. `others`: other workers train meanwhile, and the limit begins anew with each clock of the run."""
        began = moved = said = time.monotonic()
        clock = self.link.run_clock
        while True:
            while not done() and not self._of_run:
                now = time.monotonic()
                if others and self.link.run_clock != clock:
                    clock, moved = self.link.run_clock, now
                left, whom = moved + limit_s - now, self.link.waits
                if left <= 0:
                    raise NarrowsError(f"waited {limit_s:.0f} s for {what}{f': {whom}' if whom else ''}")
                if now - said >= SAY_S:
                    said = now
                    say(f"{whom or f'waiting for {what}'}, {now - began:.0f} s so far ...")
                if self.group is not None:
                    self.group.waits()
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
        """The group is over: nobody waits for another rank any more, and what is of the run needs all of them."""
        self.group = None
        self._of_run.clear()

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
        all_done, least, self.missed, first, last = self._together(
            lambda group: group.least(done, -self._heard, self.missing(), self._call, -self._call)
        )
        if first != -last:
            self._refuse(self.group)
        newest, deadline = -least, time.monotonic() + HEARD_LIMIT_S
        while self._heard < newest:  # it is on its way to us
            if not self._take(1.0) and time.monotonic() > deadline:
                raise NarrowsError(f"the first process of this group has said nothing for {HEARD_LIMIT_S:.0f} s")
        coming = len(self._of_run) - (self._heard - newest)
        for _ in range(coming):
            self.handle(self._of_run.popleft())
        return bool(all_done) and not coming

    def _refuse(self, group: Group) -> None:
        """Raise UsageError for what the ranks have called."""
        ranks: dict[bytes, int] = {}
        for rank, call in enumerate(group.told(CALLS[self._call].encode())):
            ranks.setdefault(call, rank)
        called = " and ".join(f"process {rank} has called {call.decode()}" for call, rank in ranks.items())
        raise UsageError(
            f"{called}, but all of them call the same at once: give each as many steps, for a script that ends calls "
            "finish(), and leave no such call to one process"
        )

    def _together(self, work: Callable[[Group], Any]) -> Any:
        """The ranks of a group do this together. Raises what ended the session, rather than that another rank ended of it."""
        assert self.group is not None
        try:
            return work(self.group)
        except NarrowsError:
            deadline = time.monotonic() + ENDED_S
            while time.monotonic() < deadline:
                self.link.take(ENDED_S)
            raise
