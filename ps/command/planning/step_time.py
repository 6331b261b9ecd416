"""The seconds of a script's step on this machine, from the record of a run, or of a run that is started to time it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.runtime.storage.record_file import tail_of, told
from narrows.ps.planner.plan_writer import words_of
from narrows.ps.probe.director import STEPS_S

STEPS = 20  # the result is the median of so many steps
ENDS_S = 30.0  # a script is killed if it has not ended this long after Ctrl-C
TURN_S = 0.2  # between two looks at the record
LINES_MAX = 100_000  # lines of a record that are read


def of_record(path: str, flag: str = "--record") -> list[float]:
    """Return the seconds of the first steps in a record of ps-worker, without waiting and coding.

    Args:
        path: the record.
        flag: the flag that an error names.

    Returns:
        At most STEPS times.

    Raises:
        UsageError: the file cannot be read, or is no record.
    """
    found = list[float]()
    try:
        for line, _ in zip(tail_of(path).lines(), range(LINES_MAX), strict=False):
            event = json.loads(line)
            if event.get("event") == "step" and "step_seconds" in event and len(found) < STEPS:
                others = event.get("encode_seconds", 0.0) + event.get("wait_seconds", 0.0)
                found.append(max(0.0, float(event["step_seconds"]) - float(others)))
    except OSError as error:
        raise UsageError(f"{flag} {told(path, error)}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{flag} {path}: this is no record of ps-worker ({error})") from None
    return found


def step_seconds(record: str, script: str, stop: threading.Event) -> float:
    """Return the median seconds of a step.

    Args:
        record: the record of a run; "" for none.
        script: a script and its arguments, run to time it; "" for none. Without both the result is 0.0.
        stop: set once the result is no longer needed.

    Raises:
        NarrowsError: there is no such record, or no step was made.
    """
    found = of_record(record) if record else of_script(script, stop) if script else [0.0]
    if not found:
        raise UsageError(f"--record {record}: it has no step of a worker yet")
    return statistics.median(found)


def of_script(script: str, stop: threading.Event) -> list[float]:
    """Run SCRIPT ARGS as one worker alone, until it has made STEPS steps or `stop` is set; return their seconds.

    Raises:
        NarrowsError: the script made no step.
    """
    words = words_of(script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("NARROWS_")}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        record = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "narrows.worker.command.cli", "--record", str(record), *words]
        made = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
        end, found = time.monotonic() + STEPS_S, list[float]()
        try:
            while len(found) < STEPS and made.poll() is None and time.monotonic() < end and not stop.wait(TURN_S):
                found = of_record(str(record), "--script") if record.exists() else []
        finally:
            for number in (signal.SIGINT, signal.SIGKILL):
                if made.poll() is None:
                    made.send_signal(number) if number == signal.SIGINT else os.killpg(made.pid, number)
                    try:
                        made.wait(ENDS_S)
                    except subprocess.TimeoutExpired:
                        continue
        if not (found := found or (of_record(str(record), "--script") if record.exists() else [])):
            said.seek(0)
            last = said.read()[-4096:].decode(errors="replace").strip().splitlines()[-3:]
            raise NarrowsError(f"--script {script}: it made no step; its last words: {' / '.join(last)}")
        return found
