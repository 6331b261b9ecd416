"""The loop of a thread that owns a `Port`: it receives messages, runs commands of other threads and ticks a machine.

How it works
1. `port.receive` waits for messages, WAIT_MS at most. `Loop.call` and `Loop.stop` end the wait, from any thread.
2. Each message goes to `on_message` as frames. The callback decodes it, since callers trust different senders. Before
   each message, and after the last one, the commands of other threads run: a busy network delays no thread.
3. `on_turn` runs once: in it a caller takes the results of its other threads.
4. `time_ns` returns the time, mostly `AwakeClock.turn`. `on_tick` gets that time, if the last tick is `tick_ms` ago.
5. `goes_on` decides whether there is another turn. By default there is one until `stop`, and until no command is left.

An exception of a callback ends the loop and reaches the caller of `run`. A callback handles a bad message itself.

The loops of the product, and what differs between them:

| loop | wait, tick (ms) | time | a bad message is | ends when |
|---|---|---|---|---|
| a server (ps/process/runner.py) | 50, 50 | awake | refused | its run is over, or its supervisor stops it |
| a standby (ps/process/standby_runner.py) | 50, each turn | awake | counted | it takes over, or is stopped |
| a worker (worker/runtime/member_link.py) | 50, 50 | awake | dropped | `stop` was called |
| a stage of a pipeline (channel_runner.py) | 50, 50 | awake | dropped | `stop` was called |
| a bootstrap (ps/process/bootstrap_client.py) | 50, 500 | monotonic | raised | the answer came, or after CONNECT_S |
| an archive client (ps/checkpoints/remote_archive.py) | 100, each turn | monotonic | raised | all came, or QUIET_S |
| a remote shard host (ps/command/remote_shards.py) | 50, 1000 | monotonic | ignored | `stop` was called |
| the director of ps-probe (ps/command/planning/probe_runner.py) | 100, each turn | monotonic | answered | all is measured |
| a machine of ps-probe (ps/command/planning/probe_runner.py) | 100, 1000 | monotonic | raised | the director says so |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from narrows.protocols.effects import NS
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.sockets import Peer, Port

WAIT_MS = 50  # interval of the turns of an idle loop
TICK_MS = 50  # interval of a machine's ticks; each tick of a server costs its standby as much as a small message

Command = Callable[[], object]


def _nothing() -> None: ...


class Loop:
    """The loop over `port`. One thread runs it; any thread may `call` and `stop`.

    Args:
        port: The messages come from here. The thread of the loop owns it.
        on_message: Gets the peer and the frames of each message.
        on_tick: Gets the time in ns, every `tick_ms` at most.
        on_turn: Runs once a turn, after the messages and before the tick.
        wait_ms: A turn without messages takes this long.
        tick_ms: Time between two ticks. 0: each turn has one.
    """

    def __init__(
        self,
        port: Port,
        on_message: Callable[[Peer, list[Buffer]], object],
        on_tick: Callable[[int], object],
        on_turn: Callable[[], object] = _nothing,
        wait_ms: int = WAIT_MS,
        tick_ms: int = TICK_MS,
    ) -> None:
        self.port, self.wait_ms, self.tick_ns = port, wait_ms, tick_ms * NS // 1000
        self.on_message, self.on_tick, self.on_turn = on_message, on_tick, on_turn
        self._commands: deque[Command] = deque()
        self._woken = False  # a call has woken the loop, which has not looked at the commands since
        self._stopped = False
        self._due_ns = -1  # time of the next tick; -1: the loop has not begun

    def call(self, command: Command) -> None:
        """Have the thread of the loop run `command` at once. Only the first of several calls has to wake it."""
        self._commands.append(command)
        if not self._woken:
            self._woken = True
            self.port.wake()

    def call_later(self, command: Command) -> None:
        """Have the thread of the loop run `command` in its next turn, without waking the loop."""
        self._commands.append(command)

    def stop(self) -> None:
        """End a loop whose `goes_on` is the default, once it has run the commands that were given before."""
        self._stopped = True
        self.port.wake()

    def tick_soon(self) -> None:
        """Tick in this turn, or in the next one if this turn has ticked. Only the thread of the loop may call this."""
        self._due_ns = 0

    def run(self, time_ns: Callable[[], int], goes_on: Callable[[], bool] | None = None) -> None:
        """Loop until `goes_on` is false.

        Args:
            time_ns: The time of a turn. It never goes back.
            goes_on: True if there is another turn. None: until `stop`.

        Raises:
            Exception: The exception of a callback or a command.
        """
        goes_on = goes_on or self._not_stopped
        receive, commands, on_message = self.port.receive, self._commands, self.on_message
        if self._due_ns < 0:
            self._due_ns = time_ns() + self.tick_ns
        while goes_on():
            for peer, frames in receive(self.wait_ms):
                while commands:
                    commands.popleft()()
                on_message(peer, frames)
            self._woken = False  # before the commands: a later call wakes the loop again
            while commands:
                commands.popleft()()
            self.on_turn()
            now_ns = time_ns()
            if now_ns >= self._due_ns:
                self._due_ns = now_ns + self.tick_ns
                self.on_tick(now_ns)

    def _not_stopped(self) -> bool:
        return not self._stopped or bool(self._commands)
