"""Scenarios as text: commands, and under each, indented, what must come of it. `play` runs the commands anew.

    cluster sync=bsp workers=2 shards=2 checkpoint_every=0.3
    until clock 6           run until min_clock is there; `until over`, `run SECONDS`
    hold w* > s0 Push       keep back such messages (patterns); `lose` drops them, `mend` ends both, `release` sends the held
    crash s1                `start s1` is its next life; workers too

The machines, the workers and the checker are those of a simulated run, on a network that keeps order and loses nothing.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from simulation.campaigns import Case, Run
from simulation.simulator import MS, Faults

LIMIT_NS = 120 * NS  # of one `until`


class Stage(Run):
    """A run whose faults are placed by hand."""

    hurried = False

    def __init__(self, words: list[str]) -> None:
        flags = dict(word.split("=") for word in words)
        step_ms = int(flags.pop("step_ms", 30))  # from half of it to all: how long a worker computes
        known = {name: type(getattr(Settings(), name)) for name in Settings.__slots__}
        settings = Settings(
            **{"lease": 2.0, "checkpoint_every": 0.0} | {name: known[name](value) for name, value in flags.items()}
        ).validated()
        self.lines: list[str] = []
        self.filters: list[tuple[str, str, str, str]] = []
        self.held: list[tuple[str, str, m.Message]] = []
        self.lives: dict[str, int] = {}
        faults = Faults(delay_ns=(MS, MS))
        steps = tuple(step_ms * MS for _ in range(settings.workers))
        super().__init__(Case(0, settings, faults, 0.0, steps, None, None, None, False), trace=self._trace)
        self.disk.slow_ns = 0
        self.restarts = True

    def _trace(self, now_ns: int, text: str, message: m.Message | None) -> None:
        if message is None:
            self.lines.append(f"    {text}")

    def send(self, source: str, target: str, message: m.Message) -> None:
        for action, *patterns in self.filters:
            if all(map(fnmatchcase, (source, target, type(message).__name__), patterns)):
                if action == "hold":
                    self.held.append((source, target, message))
                return
        super().send(source, target, message)

    def command(self, name: str, words: list[str]) -> None:
        if name == "run":
            self._until(self.sim.now_ns + int(float(words[0]) * NS), clock=-1)
        elif name == "until":
            limit_ns = self.sim.now_ns + LIMIT_NS
            self._until(limit_ns, clock=int(words[1]) if words[0] == "clock" else -1)
            if self.sim.now_ns >= limit_ns:
                self.lines.append("    never")
        elif name in ("hold", "lose"):
            self.filters.append((name, words[0], words[2], words[3]))
        elif name == "mend":
            self.filters.clear()
        elif name == "release":
            self.filters.clear()
            for source, target, message in self.held:
                super().send(source, target, message)
            self.held.clear()
        elif name == "crash":
            self._crash(words[0])
        elif name == "start":
            self.lives[words[0]] = life = self.lives.get(words[0], 0) + 1
            (self._serve if words[0][0] == "s" else self._work)(int(words[0][1:]), life)
        else:
            raise ValueError(f"unknown command {name}")

    def _crash(self, who: str) -> None:
        index = int(who[1:])
        if who[0] == "w":
            self.sim.crash(self.workers[index].name)
            return
        self.sim.struck["shard restarted"] += 1
        self.checker.server_crashed(self.servers[index])
        self.sim.crash(self.servers[index].port, self.servers[index].up)

    def _until(self, limit_ns: int, clock: int) -> None:
        while self.sim.now_ns < limit_ns and not self._ended():
            coordinator = self.servers[0].coordinator if 0 in self.servers else None
            if coordinator is not None and 0 <= clock <= coordinator.min_clock and coordinator.started:
                return
            assert self.sim.step()
        if self._ended():
            self.lines.append("    over")


def play(text: str) -> str:
    """`text` with what really comes of its commands."""
    stage: Stage | None = None
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line.startswith("#"):
            continue
        name, *words = line.split()
        if stage is None:
            assert name == "cluster"
            stage = Stage(words)
        else:
            stage.command(name, words)
        lines += stage.lines
        stage.lines.clear()
    return "\n".join(lines) + "\n"
