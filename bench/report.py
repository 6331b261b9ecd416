"""Makes docs/results.md and the table of results in README.md from the lines in bench/results/.

    python -m bench.report                              # write both pages
    python -m bench.report bench/speed/compressors.py   # run that bench with its arguments, then write both pages
    python -m bench.report --check                      # exit code 1 where a page is not what the data gives

How it works
- Each file in bench/results/ is a section: what its script measures and how to run it again, from the script's docstring,
  then a table for each heading that its lines name (bench/lab/record.py).
- A row of README's table is a contender of bench/contenders/wan.py: its lines with seed 0 and all steps, at the rate with
  the lowest loss. A figure that was measured at another rate says so; a time of a busy machine is not taken.
- Its last columns are the newest lines of bench/speed/pace.py with two workers, and of bench/speed/start_and_end.py, with
  the flags of that row or the nearest.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "docs")]

from lab import record
from lab.record import NOT_TOLD, RESULTS, ROOT, Line, RecordError, shown
from marked_tables import MarkedTable

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
HEAD = """# Results

`python -m bench.report` makes this page and the table of README.md from the lines in `bench/results/`. To add a result, run
one command in the repository's root; it runs a bench, appends a line for each run and writes both pages anew:

    python -m bench.report bench/speed/compressors.py   # any script below, with its arguments

- A row has the median of its lines, and in brackets the smallest and the largest value. Lines of one row differ in their
  seed, or are repeats. *over X* is the first figure of the row, compared with that of run X.
- A *busy machine* had a load above half of its cores as the bench began. Its seconds mean little. Losses and bytes do not
  depend on the load.
- Tables of the byte GPT with many workers are the hard case: all workers share 32 windows of 64 bytes, so each of 16 has 128
  tokens a step, where others train with 65,000 to 393,000. At that scale the loss of DiLoCo grows as M^0.0116 with M
  workers, 0.8 % with each doubling (2503.09799, joint fit; the exponent was not checked against its text here). Tables of
  *weak scaling* keep the windows of a worker.
- The lines say more than the tables: machine, date, versions and arguments of each run. Rows of version 0.1 are from
  [the archive](archive/results-0.1.md), which has all tables of that version. `-` and *load not told*: it does not say.
"""
PICTURES = {
    "speed/pace": ("pace.svg", "Seconds to a loss by Mbit/s, a line for each plan")
}  # in docs/, and what each shows
ORDER = ("contenders", "loss", "speed", "faults", "planning", "gpu")  # of the sections

# README's rows: name, run in wan.jsonl, inner optimizer.
ROWS = (
    ("PyTorch DDP over gloo", "ddp", "adamw"),
    ("torchft 0.2.0, DiLoCo, 50 local steps", "torchft diloco H=50", "adamw"),
    ("Narrows, local, H = 20, `--outer iso`, `int8`", "local H=20 iso int8", "adamw"),
    ("Narrows, ssp, s = 2, `topk:0.11+sign`", "ssp topk:0.11+sign staleness 2", "adamw"),
    ("Narrows, ssp, s = 2, `cycle:0.15+sign`", "ssp cycle:0.15+sign staleness 2", "adamw"),
    ("Narrows, ssp, s = 2, `topk:0.11+sign`, Muon", "ssp topk:0.11+sign staleness 2", "muon"),
)
# Row of start_and_end.jsonl with the flags of a run of wan.jsonl; its bytes do not depend on the optimizer.
ENDS = {
    "diloco H=50": "local dense",
    "ssp topk:0.11+sign staleness 2": "ssp topk:0.11+sign",
    "ssp cycle:0.15+sign staleness 2": "ssp cycle:0.15+sign",
}
# Row of pace.jsonl with the flags of a run of wan.jsonl, and how it differs: paces do not depend on the optimizer.
PACES = {
    "ddp": ("DDP", ""),
    "torchft diloco H=50": ("torchft DiLoCo, H = 32", "H = 32"),
    "local H=20 iso int8": ("local, H = 48, 4 fragments, 2bit", "H = 48, `2bit`"),
    "ssp topk:0.11+sign staleness 2": ("ssp, s = 2, topk:0.11+sign", ""),
    "ssp cycle:0.15+sign staleness 2": ("ssp, s = 2, cycle:0.15+sign", ""),
}
PACE_LINKS = (50.0, 1000.0)  # Mbit/s
LINK = {"mbit_per_s": 20.0, "delay_ms": 60.0}
STEPS, SIZE = 400, "1.3M"
# README's columns: name, figure, whether the learning rate changes it.
COLUMNS = (
    ("ms a step: median", "step", False),
    ("mean", "mean step", False),
    ("kB a step up", "up", False),
    ("loss", "loss", True),
    ("seconds to loss 2.1", "time to 2.1", True),
)


def sections(folder: Path) -> dict[str, list[Line]]:
    """The lines of each bench that has some, in the order of the page. Raises RecordError."""
    found: dict[str, list[Line]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in record.read(path):
            found.setdefault(line.bench, []).append(line)
    place = {name: number for number, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda each: (place.get(each[0].split("/")[0], len(ORDER)), each[0])))


def introduction(bench: str) -> str:
    """What a script measures, and its commands, from its docstring."""
    script = ROOT / "bench" / f"{bench}.py"
    if not script.exists():
        return f"The script `bench/{bench}.py` is gone. [Its question is answered](archive/bench-removed.md)."
    paragraphs = (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").split("\n\n")
    commands = next((each for each in paragraphs if each.startswith("    ")), f"    python bench/{bench}.py")
    return f"{' '.join(paragraphs[0].split())}\n\n{commands}"


def page(found: dict[str, list[Line]]) -> str:
    parts = [HEAD]
    for bench, lines in found.items():
        parts += [f"## {bench.split('/')[-1]}", introduction(bench)]
        if picture := PICTURES.get(bench):
            parts.append(f"![{picture[1]}]({picture[0]})")
        for title, own in record.by_table(lines).items():
            parts += [f"### {title}"] * bool(title) + [record.markdown(own)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def peak(line: Line) -> str:
    """The peak learning rate of a run, and AdamW's beta1 where it is not the script's 0.9."""
    beta1 = line.arguments.get("beta1", 0.9)
    return record.cell(line.arguments.get("rate")) + (f", beta1 {beta1}" if beta1 != 0.9 else "")


def readme_row(name: str, lines: Sequence[Line]) -> str:
    """The cells of one contender; dashes where nothing is known."""
    at_the_end = [line for line in lines if "loss" in line.figures]
    best = peak(min(at_the_end, key=lambda line: line.figures["loss"].value)) if at_the_end else NOT_TOLD
    cells = [name, best]
    for _, figure, by_rate in COLUMNS:
        have = [line for line in lines if figure in line.figures and (line.link or figure == "loss")]
        have = [line for line in have if not (line.busy and line.figures[figure].timed)]
        line = next((line for line in reversed(have) if peak(line) == best), have[-1] if have else None)
        if line is None:
            cells.append(NOT_TOLD)
            continue
        rate, note = peak(line), line.figures[figure].note
        notes = [note] * bool(note) + [f"at {rate}"] * (by_rate and rate != best)
        cells.append(
            shown(line.figures[figure].value, line.figures[figure].unit) + f" ({', '.join(notes)})" * bool(notes)
        )
    return f"| {' | '.join(cells)} |"


def start_and_end(run: str, found: dict[str, list[Line]]) -> str:
    """The cell with the models up and down at start and end, beyond the first weights; a dash where nothing is known."""
    lines = [line for line in found.get("speed/start_and_end", []) if line.run == ENDS.get(run)]
    if not lines:
        return NOT_TOLD
    return ", ".join(f"{lines[-1].figures[f'{way} beyond'].value:.1f}" for way in ("up", "down"))


def pace(run: str, found: dict[str, list[Line]]) -> str:
    """The cell with the share of a GPU's time that is left for compute on each of PACE_LINKS."""
    plan, differs = PACES.get(run, ("", ""))
    lines = [line for line in found.get("speed/pace", []) if line.run == plan and line.table.startswith("2 workers")]
    newest = {line.link["mbit_per_s"]: line.figures["utilisation"] for line in lines if line.link}
    if not newest:
        return NOT_TOLD
    shares = (f"{newest[link].value:.2g}" if link in newest else NOT_TOLD for link in PACE_LINKS)
    return ", ".join(shares) + f" ({differs})" * bool(differs)


def readme_table(found: dict[str, list[Line]]) -> str:
    share = "GPU %: 50, 1,000 Mbit/s"
    head = ("run", "best rate", *(name for name, _, _ in COLUMNS), share, "models, start, end")
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines = [
        line
        for line in found.get("contenders/wan", [])
        if line.link in (None, LINK)
        and line.seed in (None, 0)
        and (line.arguments.get("steps", STEPS), line.arguments.get("size")) == (STEPS, SIZE)
    ]
    for name, run, optimizer in ROWS:
        own = [line for line in lines if line.run == run and line.arguments.get("optimizer") == optimizer]
        table.append(f"{readme_row(name, own)} {pace(run, found)} | {start_and_end(run, found)} |")
    return "\n".join(table)


def pages(folder: Path, readme: str) -> dict[Path, str]:
    """Each page and its text. Raises RecordError, ValueError."""
    found = sections(folder)
    table = MarkedTable("results", README, lambda: f"\n{readme_table(found)}")
    return {PAGE: page(found), README: table.rewritten(readme)}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="write nothing; exit code 1 where a page is not what the data gives")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def main(check: bool, script: tuple[str, ...]) -> None:
    """Write the pages of results from bench/results/; with SCRIPT [ARGS...], run that bench first."""
    if script and (code := subprocess.run([sys.executable, *script], cwd=ROOT, check=False).returncode):
        raise click.ClickException(f"{script[0]} ended with {code}; the pages are as they were")
    try:
        wanted = pages(RESULTS, README.read_text("utf-8"))
    except (RecordError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    for path, text in wanted.items():
        if path.read_text("utf-8") == text:
            continue
        if check:
            raise click.ClickException(f"{path.name} is not what bench/results/ gives: run python -m bench.report")
        path.write_text(text, "utf-8")
        click.echo(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
