"""What a worker asks of a teacher and gets: at the server, in the record of ps-worker, in that of the teacher."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.scripts import batch, build, loss_of, run
from torch import nn

from narrows.compression.logits import parse_logits
from narrows.protocols.config.settings import Settings
from narrows.ps.dashboard import prometheus
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.record_reader import RecordReader
from narrows.worker import DistributedOptimizer, session
from narrows.worker.command.record import WorkerRecord
from narrows.worker.distillation.student import Teachers
from narrows.worker.distillation.teacher import AnsweringModel, TeacherService
from narrows.worker.distillation.teacher_record import TeacherRecord
from narrows.worker.distillation.teacher_runner import TeacherRunner
from narrows.worker.runtime import launcher_pipe
from narrows.worker.runtime.teacher_meter import TeacherMeter, TeacherTotals
from narrows.worker.sync import metrics

SLOW_S = 0.05  # of the teacher's model, for a batch
STEPS = 4
BATCH = 16


class SlowModel(nn.Module):
    """Predicts 5 classes at each of 3 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 15)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S)
        return self.layer(inputs).reshape(-1, 3, 5)  # type: ignore[no-any-return]


class Teaching:
    """A teacher in a thread of this process. `end` has it leave its students."""

    def __init__(self, record: Path) -> None:
        self.record = TeacherRecord(str(record), print)
        self.runner = TeacherRunner("tcp://127.0.0.1:0", 0, parse_logits, print, note=self.record.note)
        self.service = TeacherService(self.runner, AnsweringModel(SlowModel()), print, self.record.note)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        while not self.over.is_set():
            self.service.turn()

    def end(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self.thread.join(10.0)
            self.runner.close()
            self.service.end()
            self.record.close()


@contextmanager
def taught(record: Path, meter: TeacherMeter) -> Iterator[tuple[Teaching, Teachers]]:
    teaching = Teaching(record)
    address = f"tcp://127.0.0.1:{teaching.runner.port}"
    teachers = Teachers({address: None}, "top:2+int8", waits=False, tell=print, meter=meter)
    try:
        yield teaching, teachers
    finally:
        teachers.close()
        teaching.end()


def lines(path: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, path.read_text().splitlines())]


def heard_by(recording: WorkerRecord) -> Callable[..., None]:
    def hear(event: str, /, **values: Any) -> None:
        recording.take(0, json.loads(json.dumps({"event": event, **values})))

    return hear


def test_figures_of_a_teacher_arrive_at_the_server_and_in_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps that wait for an answer each, one whose batch is cached, and one after the teacher has left."""
    recording, meter = WorkerRecord(str(tmp_path / "worker"), print), TeacherMeter()
    monkeypatch.setattr(session, "_tell", heard_by(recording))
    monkeypatch.setattr(launcher_pipe, "tell", heard_by(recording))
    monkeypatch.setattr(metrics, "METER", meter)
    with run(Settings(sync="ssp", compress="dense", workers=1)) as started, taught(tmp_path / "teacher", meter) as here:
        teaching, teachers = here
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

        def step(number: int) -> bool:
            soft = teachers.ask(batch(number)[0]).take()
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            return soft is not None

        assert all(step(number) for number in [*range(STEPS), 0])
        teaching.end()
        assert not step(STEPS), "the teacher is gone, and this run goes on without"
        teachers.close()  # now no counter moves
        optimizer.finish()  # sends the last summary
        totals = meter.totals
        started.sessions[0].close(failed=False)
        said: list[dict[str, Any]] = [log.values for log in started.cluster.logs if log.event == "summary"]
    recording.ended(0, 0)
    line = recording.done([0])
    recording.close()

    samples = (STEPS + 2) * BATCH
    assert (totals.samples, totals.cached, totals.missed) == (samples, BATCH, 1)
    assert totals.predictions == 3 * STEPS * BATCH and totals.seconds > STEPS * SLOW_S
    assert totals.bytes_up > 4 * 9 * STEPS * BATCH, "inputs of float32"
    width = parse_logits("top:2+int8").record_bytes(5)
    assert width * totals.predictions < totals.bytes_down < 2 * width * totals.predictions + 2_000

    history = RunHistory()
    for values in said:
        history.take({"event": "summary", "seconds": 1.0, **json.loads(json.dumps(values))})
    (member,) = history.frame()["members"]
    assert member["teacher"]["seconds"] == pytest.approx(totals.seconds, abs=1e-4)
    moved = {"bytes_up": totals.bytes_up, "bytes_down": totals.bytes_down, "missed": 1}
    assert {name: member["teacher"][name] for name in moved} == moved
    newest = said[-1]["rows"][0]
    spent = newest["compute_seconds"] + newest["encode_seconds"] + newest["wait_seconds"]
    assert newest["wait_seconds"] >= newest["teacher_seconds"] > STEPS * SLOW_S
    assert newest["compute_seconds"] <= spent - STEPS * SLOW_S
    text = prometheus.text(history, 0.0).decode()
    assert f'narrows_teacher_bytes_total{{direction="down",level="1",peer="0"}} {float(totals.bytes_down)}' in text

    steps = [each for each in lines(tmp_path / "worker") if each["event"] == "step"]
    assert [each["teacher_missed"] for each in steps] == [0] * (STEPS + 1) + [1]
    for each in steps[:STEPS]:
        assert each["teacher_seconds"] > 0.9 * SLOW_S and each["teacher_bytes_down"] > width * 3 * BATCH
        assert each["script_seconds"] + each["teacher_seconds"] <= each["step_seconds"] + 1e-5
    assert steps[STEPS]["teacher_seconds"] == 0.0, "the batch was cached"
    (told,) = [each for each in lines(tmp_path / "worker") if each["event"] == "teachers"]
    assert TeacherTotals(**{name: told[name] for name in totals.told()}).told() == totals.told()
    mean = totals.bytes_down / totals.predictions
    assert f"teachers: up 0.0 MB, down 0.0 MB ({mean:.0f} bytes a prediction), 1 batch without" in line
    reader = RecordReader(str(tmp_path / "worker"))
    reader.read()
    (shown,) = reader.history.frame()["members"]
    assert shown["teacher"]["missed"] == 1 and shown["teacher"]["bytes_down"] <= totals.bytes_down

    of_teacher = lines(tmp_path / "teacher")
    assert [of_teacher[place]["event"] for place in (0, 1, -1)] == ["start", "student", "done"]
    counts = of_teacher[-1]
    assert (counts["samples"], counts["predictions"]) == (STEPS * BATCH, totals.predictions)
    assert counts["bytes_down"] <= totals.bytes_up and counts["bytes_up"] >= totals.bytes_down


def test_the_record_of_a_teacher_says_who_comes_and_goes(tmp_path: Path) -> None:
    path, meter = tmp_path / "teacher", TeacherMeter()
    with taught(path, meter) as (_, teachers):
        assert teachers.ask(batch(0)[0]).take() is not None
        teachers.close()
        deadline = time.monotonic() + 10.0
        while "left" not in lines(path)[-1] and time.monotonic() < deadline:
            time.sleep(0.01)
    came, *_, left, done = lines(path)[1:]
    assert (came["event"], came["students"], came["coding"]) == ("student", 1, "top:2+int8")
    assert (left["event"], left["students"], done["event"], done["students"]) == ("student", 0, "done", 0)
    assert (done["samples"], done["cached"], done["refused"]) == (BATCH, 0, 0) and done["bytes_up"] > 0


def test_a_run_without_a_teacher_shows_no_figure_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = WorkerRecord(str(tmp_path / "worker"), print)
    monkeypatch.setattr(session, "_tell", heard_by(recording))
    monkeypatch.setattr(launcher_pipe, "tell", heard_by(recording))
    monkeypatch.setattr(metrics, "METER", TeacherMeter())
    with run(Settings(sync="ssp", compress="dense", workers=1)) as started:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.finish()
        started.sessions[0].close(failed=False)
    assert "teacher" not in recording.done([0])
    recording.close()
    assert "teacher" not in (tmp_path / "worker").read_text()
