"""The streams and events of a queue: which stream takes its work, and what work runs beside it.

How it works

    the caller's stream   ── compose ──┬── forward, backward of the script ──┬── encode ──┬── compose ──>
                                       │ event                               │ event      │ event
    aside                              └────── folds of states ──────────────┘            │
    landing                                                                               └── payload to the host
                                                                                                      │ event
    host                                                                              QueueLanding.wait

Rules
- Each launch, memset and copy goes to `present`: the caller's stream (torch's current one), but within `on` and `aside`.
- If the caller's stream is another one than before, it first waits for the earlier work: all streams share the scratch
  memory.
- Work of `beside` runs from an event of the present stream on. The host waits for it by the `QueueLanding`. Work that
  writes to the scratch memory that it reads waits for it by `after_landings`.
- Work of `aside` runs after all earlier work of the queue, and before all later work, but beside what the script itself
  queues. So work of the queue never runs at the same time as other work of the queue, except that of `beside`.
- Memory that is allocated or freed within `aside` may be the script's before or after: the two streams wait for each other
  (`meet`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVENTS_MAX = 64  # events that wait for their next use
CAPTURED = (
    "the script captures its step as a CUDA graph, and a step of a worker waits for payloads: "
    "call optimizer.step() after the captured part"
)


class QueueLanding:
    """Copies to page-locked host memory that are under way."""

    def __init__(self, streams: "Streams", event: Any) -> None:
        self.streams, self.event = streams, event
        self.waited = False  # by the host, or by later work

    def done(self) -> bool:
        """Return whether the copies are complete, without waiting."""
        return bool(self.streams.driver.has_happened(self.event))

    def wait(self) -> None:
        """Wait until the copies are complete. Other threads of this process run meanwhile."""
        self.streams.driver.wait(self.event)
        self.waited = True

    def before(self, stream: Any) -> None:
        """Let the later work of a stream wait for the copies, unless something has waited for them."""
        if not self.waited:
            self.streams.driver.wait_for(self.event, stream)
            self.waited = True

    def __del__(self) -> None:
        self.streams.give_back(self.event)  # what it waited for is older than what it will wait for next


class Streams:
    """The streams of a queue.

    Args:
        driver: the driver of the device.
        current: returns the stream of the caller, a CUstream; 0: the legacy default stream.

    Attributes:
        present: the stream that takes launches and copies.
    """

    def __init__(self, driver: Any, current: Callable[[], int]) -> None:
        self.driver, self.current = driver, current
        self.present = driver.stream_of(0)
        self._handle = 0  # of the caller's stream
        self._known: dict[int, Any] = {0: self.present}
        self._own: dict[str, Any] = {}
        self._events: list[Any] = []
        self._newest: QueueLanding | None = None  # of `beside`: those before it end before it
        self._done: Any = None  # the event after the queue's newest work on the caller's stream; None: nothing is aside
        self._folded: Any = None  # the event after the newest work of `aside`, until the caller's stream waits for it
        self._caller: Any = None  # the caller's stream, within `aside`
        self._entered = 0  # contexts that are open: the outermost one alone calls the driver

    def __enter__(self) -> None:
        """Begin `Queue.active`: work goes to the caller's stream from here on.

        It may be entered again inside itself, which costs next to nothing; the caller's stream may not change there.

        Raises:
            RuntimeError: the script captures a graph of its own on its stream.
        """
        if self._entered:
            self._entered += 1
            return
        driver = self.driver
        driver.enter()
        handle = self.current()
        if driver.is_captured(self._known.get(handle) or driver.stream_of(handle)):
            driver.leave()
            raise RuntimeError(CAPTURED)
        if handle != self._handle:
            if handle not in self._known:
                self._known[handle] = driver.stream_of(handle)
            before, self.present, self._handle = self.present, self._known[handle], handle
            event = self.event()
            driver.record(event, before)
            driver.wait_for(event, self.present)
            self._events.append(event)
        if self._folded is not None:
            driver.wait_for(self._folded, self.present)
            self._events.append(self._folded)
            self._folded = None
        self._entered = 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        if self._done is not None:
            self.driver.record(self._done, self.present)
        self.driver.leave()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside this context work goes to a stream of the queue's own: beside what the script has queued and will queue.

        It may not be entered inside itself or `active`: that one's work would not have its event yet.
        """
        assert not self._entered
        driver = self.driver
        if self._done is None:  # the first time: after all that the caller has queued
            with self:
                self._done = self.event()
        driver.enter()
        self._entered = 1
        self._caller, self.present = self.present, self.own("aside")
        driver.wait_for(self._done, self.present)
        try:
            yield
        finally:
            if self._folded is None:
                self._folded = self.event()
            driver.record(self._folded, self.present)
            self.present, self._caller = self._caller, None
            self._entered = 0
            driver.leave()

    def meet(self) -> None:
        """Within `aside`, let its stream and the caller's wait for each other."""
        if self._caller is not None:
            for first, then in ((self.present, self._caller), (self._caller, self.present)):
                event = self.event()
                self.driver.record(event, first)
                self.driver.wait_for(event, then)
                self._events.append(event)

    def event(self) -> Any:
        """Return an event that nothing waits for. `give_back` takes it."""
        return self._events.pop() if self._events else self.driver.event()

    def give_back(self, event: Any) -> None:
        if len(self._events) < EVENTS_MAX:
            self._events.append(event)

    def own(self, purpose: str) -> Any:
        """Return the queue's own stream for a purpose."""
        if purpose not in self._own:
            self._own[purpose] = self.driver.own_stream()
        return self._own[purpose]

    def on(self, stream: Any, work: Callable[[], Any]) -> Any:
        """Do work whose launches and copies go to a stream, and return what it returns."""
        caller, self.present = self.present, stream
        try:
            return work()
        finally:
            self.present = caller

    def beside(self, work: Callable[[], None]) -> QueueLanding:
        """Do work on a stream of its own: after the present stream's work so far, in parallel to its later work."""
        driver, landing = self.driver, self.own("landing")
        ready, landed = self.event(), self.event()
        driver.record(ready, self.present)
        driver.wait_for(ready, landing)
        self._events.append(ready)
        self.on(landing, work)
        driver.record(landed, landing)
        self._newest = QueueLanding(self, landed)
        return self._newest

    def after_landings(self) -> None:
        """Let the later work of the present stream wait for what runs beside it."""
        if self._newest is not None:
            self._newest.before(self.present)
