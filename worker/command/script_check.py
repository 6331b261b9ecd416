"""ps-worker --check: runs two steps of a script in two workers, and prints the findings (worker/check/findings.py)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from narrows.compression.predict import Link
from narrows.protocols.errors import UsageError
from narrows.worker.check import findings
from narrows.worker.check.findings import CheckedEvents
from narrows.worker.command.launcher import SERVER, Launcher
from narrows.worker.command.options import checked
from narrows.worker.runtime.config import WorkerConfig

WORKERS = 2
LIMIT_S = 1800.0  # how long the check may take, including the script's work before its first step
# A worker that has been a step behind another for so long, or for twice as long as all before took, counts as stuck.
BEHIND_S = 20.0
DEFAULTS = {"sync": "bsp", "push": "update"}  # without flags of a run: works with any optimizer, no worker runs ahead
# Flags of ps-worker that a check leaves out: the check is over after two steps and writes nothing.
OFF: dict[str, Any] = {
    "resume": False,
    "run_id": "",
    "steps": 0,
    "fresh_run": False,
    "checkpoint_dir": "",
    "record": "",
    "trace": 0,
    "restarts": 0,
    "relay": False,
    "teacher": "",
    "teacher_key": "",
    "dashboard": "",
    "metrics": "",
}


class ScriptCheck(Launcher):
    """A launcher that starts two workers under `ScriptWatch`, collects their facts and prints the findings."""

    def __init__(self, link: str | None, **flags: Any) -> None:
        """Check the flags.

        Args:
            link: the link for which the check predicts the time of a step, as the user wrote it; None: no prediction.
            flags: the flags of ps-worker, by name.

        Raises:
            UsageError: a flag is wrong, or has no meaning in a check.
        """
        for name in ("server", "group", "plan"):
            if flags[name]:
                raise UsageError(f"--check starts two workers and a server on this machine: leave out --{name}")
        try:
            self.link = Link.parse(link) if link else None
        except ValueError as error:
            raise UsageError(f"--link {error}") from None
        self.name = link or ""
        options = checked(**flags | OFF | {"server": "", "nproc": WORKERS, "workers": None})
        run = options.run
        self.given = {name: value for name, value in run.items() if name not in ("workers", "shards")}
        if not self.given:
            run |= DEFAULTS
        self.specs = findings.specs([run, *(findings.SUGGESTED if self.link else ())])
        super().__init__(options)
        self.events = [CheckedEvents() for _ in range(WORKERS)]
        # began_s: the start of the check. ahead_s: the time of the newest step that put one worker ahead of another.
        self.began_s = self.ahead_s = time.monotonic()

    def _environment(self) -> dict[str, str]:
        return WorkerConfig(watch=(*self.specs,)).into(super()._environment())  # the fork server imports the hooks

    def _config(self, index: int, device: str) -> WorkerConfig:
        return replace(super()._config(index, device), watch=(*self.specs,))

    def _recorded(self, index: int, kind: str, event: dict[str, Any]) -> None:
        if kind != "check":
            if kind == "step":
                self.events[index].costs.append(dict(event))
            super()._recorded(index, kind, event)
            return
        self.events[index].take(event.pop("what"), event)
        if len(self.events[index].steps) > min(len(told.steps) for told in self.events):
            self.ahead_s = max(self.ahead_s, time.monotonic())

    @property
    def _running(self) -> bool:
        now_s, counts = time.monotonic(), [len(told.steps) for told in self.events]
        behind_s = max(BEHIND_S, 2 * (self.ahead_s - self.began_s))
        stuck = min(counts) < max(counts) and now_s - self.ahead_s > behind_s
        return super()._running and not stuck and now_s - self.began_s < LIMIT_S

    def _failed(self, index: int, code: int, text: str) -> None:
        if index >= 0:
            self.events[index].fail(text)
            self.errors[index] = (code, text)
        else:
            super()._failed(index, code, text)

    def _say_ended(self, index: int, code: int, group: Any) -> None:
        self.events[index].end(code)

    def _summary(self) -> int:
        """Kill the workers that are left and print the findings. Return the exit code of the check."""
        for index, worker in self.workers.items():
            if index not in self.codes:
                worker.kill()
                self.codes[index] = worker.wait() or 0
        self.console.close()
        if self.signals or SERVER in self.errors:  # the server's error has been printed already
            return next((code for code, _ in self.errors.values()), 0)
        faults, notices = (findings.found(rules, self.events) for rules in (findings.FAULTS, findings.NOTICES))
        lines = findings.facts(self.events, self.options.run)
        if self.link is not None:
            lines += findings.times(self.events, self.link, self.name, self.given)
        lines += [*(f"broken       {each}" for each in faults), *(f"notice       {each}" for each in notices)]
        for line in (
            lines if faults else [*lines, f"fine         {WORKERS} workers made {len(self.events[0].steps)} steps each"]
        ):
            self.console.out(line)
        return UsageError.exit_code if faults else 0
