"""A student of 0.4 M taught by a byte GPT of 1.3 M across a link of 20 Mbit/s and 60 ms: losses, bytes a token, step times.

    python bench/loss/distillation.py                   # all parts; the first trains the teacher, unless its file is there
    python bench/loss/distillation.py --only seconds    # five interleaved rounds on an idle machine with two cores, minutes
    python bench/loss/distillation.py --only losses --rates 0.004,0.008 --weights 0.5,0.9 --temperatures 1,2 --seeds 0

Rules
- The student is tasks/bytelm.py, a run of one worker in bsp, with its ps-serve on the same host, over loopback. The teacher
  is ps-teach with tasks/bytelm_teacher.py and keys, on the other host of the lab or on the student's.
- Each contender is tried at all rates, and a table shows the best alone. Each weight of the soft loss and temperature is a row.
- "on the wire": what the kernel counts at the student's interface, both ways, divided by the tokens that the student has
  learned from. "in messages": what the student's process counts.
- "waited": time that a step waits for soft targets. "teacher": CPU time of the teacher's process for each step.
- In part seconds the student and its server have one core, the teacher and the link the other.
- In part killed the teacher gets `kill -9` once a third of the answers are there, and starts again OUTAGE_S later.
  "outage": from the kill until the new one is ready.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way

WAY = Way(20e6, 0.06)
PORT, SERVER_PORT = 5570, 5555
TASK = Path(__file__).resolve().parents[1] / "tasks"
SMALL = ["--layers", "3", "--width", "96", "--heads", "3"]
TEACHER = ["--optimizer", "muon", "--muon-float32", "--lr", "0.006"]
TOKENS = 32 * 64  # of a step
NONE, LINK, OWN, WHOLE = "no teacher", "across the link", "on the student's machine", "in its process, all 256 classes"
CACHED = "across the link, answers cached"
CONTENDERS = (NONE, LINK, OWN, WHOLE)
LOST = ("go-on", "wait")
ROUNDS, ROUND_STEPS, ROUND_SEED = 5, 60, 100  # of part seconds; the seed of its first round
OUTAGE_S = 5.0
ANSWER_BYTES = 60  # of a token, at least
STEP_MAX = 1.05  # of the step without a teacher
START_S, LIMIT_S = 150.0, 1500.0
COUNTED = re.compile(r"([\d,]+) samples computed, ([\d,]+) answered from the cache")


@dataclass(frozen=True)
class Plan:
    """How a student learns."""

    seed: int = 0
    rate: float = 0.004  # the peak
    weight: float = 0.0  # of the soft loss; 0: no teacher
    temperature: float = 1.0
    steps: int = 400
    pause: float = 0.0  # seconds that a step waits, as for a GPU

    @property
    def words(self) -> list[str]:
        told = {"seed": self.seed, "lr": self.rate, "steps": self.steps, "pause": self.pause}
        told |= {"teacher-weight": self.weight, "temperature": self.temperature}
        return [*SMALL, *(word for name, value in told.items() for word in (f"--{name}", str(value)))]

    def arguments(self) -> dict[str, Any]:
        """The arguments of a line; how answers are asked for says nothing where there is no teacher."""
        told = asdict(self)
        del told["seed"]
        return told | ({} if self.weight else {"temperature": None})


def told(said: str) -> dict[str, float]:
    """What a student has printed: its loss, its median step in ms, and the facts about its teacher."""
    losses, steps = re.findall(r"validation loss ([\d.]+)", said), re.findall(r"median step ([\d.]+) s", said)
    if not losses or not steps:
        raise CommandFailed(f"a student told no loss:\n{said[-1500:]}")
    facts = re.findall(r"teacher (\{.*\})", said)
    found = {"loss": float(losses[-1]), "step": 1e3 * float(steps[-1])}
    return found | (json.loads(facts[-1]) if facts else {})


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Teacher:
    """A ps-teach in the lab."""

    process: subprocess.Popen[Any]
    address: str
    log: Path

    def end(self) -> tuple[int, int]:
        """End it. Returns the samples that it has computed, and those that it has answered from its cache."""
        launch.end(self.process)
        found = COUNTED.findall(self.log.read_text())
        computed, cached = found[-1] if found else ("0", "0")
        return int(computed.replace(",", "")), int(cached.replace(",", ""))


class Place:
    """Two hosts with a link: students are on the first, teachers on either. Raises CommandFailed."""

    def __init__(self, stack: ExitStack, file: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.file, self.cores = file, ({cores[0]}, {cores[-1]})
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.pin = False  # True: students and servers on one core, teachers on another
        with launch.pinned(self.cores[1]):
            self.here, self.there = stack.enter_context(netns.pair(WAY)).hosts
        self.keys, self.names = self.folder / "K", 0
        launch.run([*launch.ps_serve("")[:3], "keys", "init", str(self.keys)], START_S)
        launch.run([*launch.ps_serve("")[:3], "keys", "add", "student", "--keys", str(self.keys)], START_S)

    def start(self, host: netns.Host, words: list[str], core: int) -> tuple[subprocess.Popen[Any], Path]:
        self.names += 1
        log = self.folder / f"{self.names}.log"
        with log.open("w") as out, launch.pinned(self.cores[core] if self.pin else self.cores[0] | self.cores[1]):
            return host.popen(words, stdout=out, stderr=out, cwd=self.folder), log

    def teacher(self, host: netns.Host) -> Teacher:
        """Start a teacher on a host, and wait until it answers."""
        ready = self.folder / "taught.ready"
        ready.unlink(missing_ok=True)
        words = [sys.executable, "-m", "narrows.worker.command.teach", "--bind", f"tcp://0.0.0.0:{PORT}"]
        words += ["--keys", str(self.keys), "--ready-file", str(ready), str(TASK / "bytelm_teacher.py"), str(self.file)]
        process, log = self.start(host, words, 1)
        self._until(ready, process, "the teacher", log)
        return Teacher(process, f"tcp://{host.address if host is self.there else '127.0.0.1'}:{PORT}", log)

    def run(self, plan: Plan, teacher: Teacher | None, *more: str, number: int = 0, workers: int = 1) -> list[Student]:
        """Start a run with its server: `more` are flags of its students. `number`: of runs at one time, from 0 on."""
        ready, port = self.folder / f"served-{number}.ready", SERVER_PORT + number
        ready.unlink(missing_ok=True)
        flags = ["--sync", "bsp", "--workers", str(workers), "--insecure", "--ready-file", str(ready)]
        server, log = self.start(self.here, launch.ps_serve(f"127.0.0.1:{port}", *flags), 0)
        self._until(ready, server, "the server", log)
        words = ["--server", f"tcp://127.0.0.1:{port}"]
        if teacher:
            words += ["--teacher", teacher.address, "--teacher-key", str(self.keys / "student.key"), *more]
        words = launch.ps_worker(*words, str(TASK / "bytelm.py"), *plan.words)
        if plan.weight and not teacher:
            words += ["--teacher-file", str(self.file)]
        return [Student(*self.start(self.here, words, 0)) for _ in range(workers)]

    def _until(self, ready: Path, process: subprocess.Popen[Any], who: str, log: Path) -> None:
        """Wait for the start of a process. Raises CommandFailed with its last words where it ends, or takes too long."""
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandFailed(f"{who} did not start; its last words:\n{log.read_text()[-1500:]}")
            time.sleep(launch.POLL_S)

    def crossed(self) -> int:
        """Bytes at the student's end of the link so far, both ways."""
        return sum(self.here.bytes())

    def passed(self, crossed: int, student: Student) -> bool:
        """True once so many bytes have crossed, or the student has ended."""
        return self.crossed() > crossed or student.process.poll() is not None


@dataclass
class Student:
    """A ps-worker that learns."""

    process: subprocess.Popen[Any]
    log: Path

    def end(self) -> dict[str, float]:
        """Wait for its end. Returns what it has told. Raises CommandFailed."""
        try:
            if self.process.wait(LIMIT_S):
                raise CommandFailed(f"a student failed:\n{self.log.read_text()[-2500:]}")
        except subprocess.TimeoutExpired:
            raise CommandFailed(
                f"a student took longer than {LIMIT_S:.0f} s:\n{self.log.read_text()[-1500:]}"
            ) from None
        return told(self.log.read_text())


@dataclass
class Bench:
    """What all parts share: where results go, the teacher's file, what to try."""

    recorder: record.Recorder
    file: Path
    plan: Plan  # weight and temperature are those of students with a teacher
    seeds: list[int]
    rates: list[float]
    weights: list[float]
    temperatures: list[float]
    contenders: list[str]
    teacher_steps: int

    @contextmanager
    def place(self) -> Iterator[Place]:
        if not self.file.exists():
            raise CommandFailed(f"{self.file}: there is no teacher yet; --only teacher trains one")
        with ExitStack() as stack:
            yield Place(stack, self.file)

    def add(self, run: str, table: str, plan: Plan, figures: record.Figures, **more: Any) -> None:
        link = record.link_of(WAY) if run not in (NONE, OWN, WHOLE) else None
        self.recorder.add(
            run, figures, table=table, seed=plan.seed, link=link, **({"arguments": plan.arguments()} | more)
        )
        said = ", ".join(
            f"{name} {record.shown(value, unit)} {unit}".strip() for name, (value, unit) in figures.items() if value
        )
        click.echo(f"{run}: {said} ({', '.join(f'{name} {value}' for name, value in asdict(plan).items())})")

    # The parts.

    def teacher(self) -> None:
        """Train the teacher where its file is not there, and measure its loss."""
        import bytelm

        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            words = [*TEACHER, "--steps", str(self.teacher_steps), "--save", str(self.file)]
            launch.run([sys.executable, str(TASK / "bytelm.py"), *words], 10 * LIMIT_S)
        loss = bytelm.validation_loss(bytelm.saved(str(self.file)), bytelm.library()[1], bytelm.SHAPE["context"])
        arguments = {"steps": self.teacher_steps, "optimizer": "muon", "rate": 0.006}
        self.recorder.add(
            "the teacher", {"loss": (loss, "nats a byte")}, table="the teacher", seed=0, arguments=arguments
        )
        click.echo(f"the teacher: held-out loss {loss:.4f}")

    def losses(self) -> None:
        """Train students of each contender, with all rates, weights and temperatures."""
        with self.place() as place:
            hosts = {LINK: place.there, OWN: place.here}
            for contender in self.contenders:
                teacher = place.teacher(hosts[contender]) if contender in hosts else None
                taught = [(0.0, 1.0)] if contender == NONE else product(self.weights, self.temperatures)
                for (weight, temperature), rate, seed in product(list(taught), self.rates, self.seeds):
                    plan = replace(self.plan, weight=weight, temperature=temperature, rate=rate, seed=seed)
                    before = place.crossed()
                    (student,) = place.run(plan, teacher)
                    facts = student.end()
                    figures: record.Figures = {"loss": (facts["loss"], "nats a byte")}
                    if contender in hosts:
                        figures |= bytes_a_token(facts, place.crossed() - before, plan.steps)
                    self.add(contender, "loss", plan, figures, best_of="rate", beside=NONE)
                if teacher:
                    teacher.end()

    def seconds(self) -> None:
        """Take the steps of students with and without a teacher, in turn."""
        steps = dict[str, list[float]]()
        with self.place() as place:
            place.pin = True
            teachers = {LINK: place.teacher(place.there), OWN: place.teacher(place.here)}
            teachers[CACHED] = teachers[LINK]  # which has just answered the same samples
            for turn in range(ROUNDS):
                for row in (NONE, LINK, CACHED, OWN):
                    plan = replace(self.plan, seed=ROUND_SEED + turn, steps=ROUND_STEPS)
                    plan = plan if row in teachers else replace(plan, weight=0.0)
                    teacher = teachers.get(row)
                    before, crossed = cpu_s(teacher.process.pid) if teacher else 0.0, place.crossed()
                    facts = place.run(plan, teacher)[0].end()
                    steps.setdefault(row, []).append(facts["step"])
                    figures: record.Figures = {"step": (facts["step"], "ms")}
                    if teacher:
                        figures["waited"] = 1e3 * facts["waited_s"] / plan.steps, "ms a step"
                        figures["teacher"] = 1e3 * (cpu_s(teacher.process.pid) - before) / plan.steps, "ms a step"
                        figures |= bytes_a_token(facts, place.crossed() - crossed, plan.steps)
                    title = "step time" + f", a pause of {1e3 * plan.pause:g} ms as for a GPU" * bool(plan.pause)
                    self.add(row, title, plan, figures, beside=NONE)
        for line in ratios(steps):
            click.echo(line)

    def students(self) -> None:
        """Two students ask one teacher: two runs of the same samples, and two workers of one run."""
        with self.place() as place:
            for row, runs, workers in (("two runs, the same samples", 2, 1), ("two workers of one run", 1, 2)):
                teacher, before = place.teacher(place.there), place.crossed()
                began = [place.run(self.plan, teacher, number=number, workers=workers) for number in range(runs)]
                facts = [student.end() for run in began for student in run]
                crossed = place.crossed() - before
                computed, cached = teacher.end()
                figures: record.Figures = {
                    "loss": (statistics.mean(each["loss"] for each in facts), "nats a byte"),
                    "steps without soft targets": (sum(each["missed"] for each in facts), ""),
                    "computed": (computed, "samples"),
                    "from the teacher's cache": (cached, "samples"),
                }
                whole = {way: sum(each[way] for each in facts) for way in ("bytes_up", "bytes_down")}
                figures |= bytes_a_token(whole, crossed, runs * self.plan.steps)
                self.add(row, "two students, one teacher", self.plan, figures)

    def killed(self) -> None:
        """The teacher is killed and started again."""
        with self.place() as place:
            for lost in LOST:
                teacher, before = place.teacher(place.there), place.crossed()
                (student,) = place.run(self.plan, teacher, "--teacher-lost", lost)
                third = before + self.plan.steps * TOKENS * ANSWER_BYTES // 3
                launch.until(partial(place.passed, third, student), "a third of the answers", LIMIT_S)
                died = time.monotonic()
                teacher.process.kill()
                teacher.process.wait()
                time.sleep(OUTAGE_S)
                teacher = place.teacher(place.there)
                outage = time.monotonic() - died
                facts = student.end()
                teacher.end()
                figures: record.Figures = {
                    "loss": (facts["loss"], "nats a byte"),
                    "steps without soft targets": (facts["missed"], ""),
                    "longest step": (facts["longest_s"], "s"),
                    "outage": (outage, "s"),
                }
                self.add(f"--teacher-lost {lost}", "the teacher is killed and started again", self.plan, figures)


PARTS = {name: getattr(Bench, name) for name in ("teacher", "losses", "students", "killed", "seconds")}


def bytes_a_token(facts: dict[str, float], crossed: float, steps: int) -> record.Figures:
    """Bytes of answers and requests; none crosses the link where the teacher is on the student's machine."""
    tokens = steps * TOKENS
    up, down = facts["bytes_up"] / tokens, facts["bytes_down"] / tokens
    figures: record.Figures = {"in messages, up": (up, "bytes a token"), "in messages, down": (down, "bytes a token")}
    wire = crossed / tokens
    return figures | ({"on the wire": (wire, "bytes a token")} if wire > up else {})


def ratios(steps: dict[str, list[float]]) -> list[str]:
    """A sentence for each row with a teacher: the median of its rounds' steps over those without, and what was aimed at."""
    found = []
    for row, own in steps.items():
        if row != NONE:
            each = [mine / alone for mine, alone in zip(own, steps[NONE], strict=True)]
            ratio = statistics.median(each)
            verdict = "held" if ratio <= STEP_MAX else f"missed, over {STEP_MAX}"
            found.append(f"{row}: {ratio:.4f} (rounds: {', '.join(f'{one:.3f}' for one in each)}): {verdict}")
    return found


def numbers(of: Callable[[str], Any]) -> Callable[..., Any]:
    """Reads numbers with commas between them."""

    def read(context: click.Context, option: click.Parameter, text: str) -> list[Any]:
        try:
            return [of(word) for word in text.split(",")]
        except ValueError:
            raise click.BadParameter(f"{text!r}: give numbers with commas between them", context, option) from None

    return read


@click.command(context_settings={"show_default": True})
@click.option("--only", type=click.Choice([*PARTS]), multiple=True, help="a part; may be repeated  [default: all]")
@click.option(
    "--teacher", "file", type=click.Path(path_type=Path), default=launch.OUT / "bytelm-teacher.pt", help="its file"
)
@click.option("--teacher-steps", default=1500, help="of its training")
@click.option("--contenders", default="*", help=f"of losses, a word in their names: {'; '.join(CONTENDERS)}")
@click.option("--steps", default=400, help="of a student")
@click.option("--seeds", default="0,1,2", callback=numbers(int), help="of losses; other parts take the first")
@click.option("--rates", default="0.004", callback=numbers(float), help="peak rates to try; other parts take the first")
@click.option("--weights", default="0.5", callback=numbers(float), help="of the soft loss, alike")
@click.option("--temperatures", default="1", callback=numbers(float), help="of the answers, alike")
@click.option("--pause", default=0.0, help="seconds that a step waits besides, as for a GPU")
@record.out_option("loss/distillation")
def main(
    only: tuple[str, ...],
    file: Path,
    teacher_steps: int,
    contenders: str,
    steps: int,
    seeds: list[int],
    rates: list[float],
    weights: list[float],
    temperatures: list[float],
    pause: float,
    out: Path,
) -> None:
    """Measure students with and without a teacher across a narrow link."""
    if missing := netns.available():
        raise click.ClickException(missing)
    chosen = [each for each in CONTENDERS if contenders == "*" or contenders in each]
    if not chosen:
        raise click.UsageError(f"--contenders {contenders}: there is none; contenders: {'; '.join(CONTENDERS)}")
    plan = Plan(seeds[0], rates[0], weights[0], temperatures[0], steps, pause)
    with record.Recorder("loss/distillation", out) as recorder:
        bench = Bench(recorder, file.resolve(), plan, seeds, rates, weights, temperatures, chosen, teacher_steps)
        for name in only or PARTS:
            try:
                PARTS[name](bench)
            except CommandFailed as error:
                raise click.ClickException(f"{name}: {error}") from None


if __name__ == "__main__":
    main()
