"""Every wait of an engine: handles the link's events until a condition holds. The main thread owns it.

Rules
- All ranks of a group wait for the same conditions in the same order, and no rank goes on before all can.
- A script makes the same calls on all ranks. If it does not, the next agreement of the ranks raises UsageError.
- All ranks handle events of the whole run, such as a rejoin or a move of keys, at the same point: between two
  agreements. Each rank handles events of a shard as they arrive.

    rank 0    done? ─ event of the run ─┐               handle event ─ done ─┐
    rank 1    done ────── waits ────────┴─ agreement ── handle event ─ done ─┴─ agreement: both go on
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
from narrows.worker.runtime.trace import StepTrace

# Calls that a script makes on all ranks of a group together.
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
HEARD_LIMIT_S = 60.0  # an event that one rank has received reaches all ranks within this
SAY_S = 10.0  # between two lines about a wait
ENDED_S = 2.0  # after another rank has ended, its reason arrives within this


class EventWait:
    """The waits of one engine.

    Args:
        link: delivers events.
        group: the group in which this process is one rank, if any.
        handle: called with each event, in order.
        standing: called at each agreement of the ranks, for the attributes `missed` and `steps`.
        trace: counts the seconds of the waits.

    Attributes:
        missed: rounds that closed without this worker, at the newest agreement: the fewest that a rank knows.
        steps: the run's steps before the present round, likewise (--local-seconds).
    """

    def __init__(
        self,
        link: MemberLink,
        group: Group | None,
        handle: Callable[[MemberEffect], None],
        standing: Callable[[], tuple[int, int]] = lambda: (0, 0),
        trace: StepTrace | None = None,
    ) -> None:
        self.link, self.group, self.handle, self._standing = link, group, handle, standing
        self.trace = trace or StepTrace()
        self.missed = self.steps = 0
        self._call = 0  # index in CALLS of the script's newest call
        self._of_run: deque[MemberEffect] = deque()  # events of the whole run, not handled yet
        self._heard = 0  # events of the whole run that were received so far

    def calls(self, what: str) -> None:
        """Note the script's call, a name of CALLS. The next agreement checks that all ranks have made it."""
        self._call = CALLS.index(what)

    def until(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None:
        """Handle events until `done()` is true, on all ranks of a group.

        Args:
            done: the condition; it is evaluated after each event.
            limit_s: the longest wait in seconds.
            what: what is awaited, for the error and for the line that is printed every SAY_S seconds.
            others: other workers train meanwhile, so the limit begins anew with each clock of the run.

        Raises:
            NarrowsError: the condition does not hold within `limit_s`, or the session has ended.
            UsageError: the ranks have made different calls.
        """
        with self.trace.wait:
            self._until(done, limit_s, what, others)

    def _until(self, done: Callable[[], bool], limit_s: float, what: str, others: bool) -> None:
        began = moved = said = time.monotonic()
        clock = self.link.run_clock if others else 0
        while True:
            while not done() and not self._of_run:
                now = time.monotonic()
                if others and self.link.run_clock != clock:
                    clock, moved = self.link.run_clock, now
                left = moved + limit_s - now
                if left <= 0:
                    whom = self.link.waits
                    raise NarrowsError(f"waited {limit_s:.0f} s for {what}{f': {whom}' if whom else ''}")
                if now - said >= SAY_S:
                    said = now
                    say(f"{self.link.waits or f'waiting for {what}'}, {now - began:.0f} s so far ...")
                if self.group is not None:
                    self.group.waits()
                self._take(min(left, 1.0))
            if self._agreed(done()):
                return

    def poll(self) -> None:
        """Handle the events that have arrived, without waiting. In a group, events of the run wait for an agreement."""
        while self._take(0.0):
            pass

    def agree(self) -> None:
        """Have all ranks of a group handle the events of the run that any of them has received."""
        self._agreed(True)

    def alone(self) -> None:
        """Go on without the group, at the end: no rank waits for another, and events of the run are dropped."""
        self.group = None
        self._of_run.clear()

    def _take(self, timeout_s: float) -> bool:
        """Take an event, waiting up to `timeout_s` seconds. Returns whether there was one."""
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
        """Make an agreement of all ranks.

        Returns:
            True if all ranks are done and no event of the run was due. If one was due, all ranks have handled it now.
        """
        if (group := self.group) is None:
            return done
        mine = (done, -self._heard, *self._standing(), self._call, -self._call)
        all_done, least, self.missed, self.steps, first, last = self._together(lambda: group.least(*mine))
        if first != -last:
            self._refuse(group)
        newest, deadline = -least, time.monotonic() + HEARD_LIMIT_S
        while self._heard < newest:  # another rank has received it already
            if not self._take(1.0) and time.monotonic() > deadline:
                raise NarrowsError(f"the first process of this group has said nothing for {HEARD_LIMIT_S:.0f} s")
        coming = len(self._of_run) - (self._heard - newest)
        for _ in range(coming):
            self.handle(self._of_run.popleft())
        return bool(all_done) and not coming

    def _refuse(self, group: Group) -> None:
        """Raise a UsageError that names the call of each rank."""
        ranks: dict[bytes, int] = {}
        for rank, call in enumerate(group.told(CALLS[self._call].encode())):
            ranks.setdefault(call, rank)
        called = " and ".join(f"process {rank} has called {call.decode()}" for call, rank in ranks.items())
        raise UsageError(
            f"{called}, but all of them call the same at once: give each as many steps, for a script that ends calls "
            "finish(), and leave no such call to one process"
        )

    def _together(self, work: Callable[[], Any]) -> Any:
        """Run a collective operation of the group.

        If it fails because the session has ended, the error of the session is raised, not that of the group.
        """
        try:
            return work()
        except NarrowsError:
            deadline = time.monotonic() + ENDED_S
            while time.monotonic() < deadline:
                self.link.take(ENDED_S)
            raise
