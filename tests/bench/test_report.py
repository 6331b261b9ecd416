"""bench/lab/record.py and bench/report.py: lines of results, and the pages that are made of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import report
from click.testing import CliRunner
from lab import record
from lab.record import Figure, Line, Recorder, RecordError, line_of, markdown

MACHINE: dict[str, record.Scalar] = {"cpu": "X", "cores": 2, "ram_gb": 4.0}


def line(run: str, loss: float, seed: int = 0, commit: str = "aaaaaaa", **more: Any) -> Line:
    """A run of the byte GPT on a link."""
    fields: dict[str, Any] = {
        "bench": "contenders/wan",
        "seed": seed,
        "commit": commit,
        "machine": MACHINE,
        "busy": False,
    }
    fields |= {"link": report.LINK, "arguments": {"steps": 400, "rate": 0.002, "optimizer": "adamw", "size": "1.3M"}}
    return Line(run=run, figures={"loss": Figure(loss, "nats a byte"), "step": Figure(1234.0, "ms")}, **fields | more)


LATE = {"steps": 400, "rate": 0.002, "beta1": 0.8, "optimizer": "adamw", "size": "1.3M"}


def rows(table: str) -> list[list[str]]:
    """The cells of each row, the head first."""
    lines = [each for each in table.splitlines() if each.startswith("| ")]
    return [each[2:-2].split(" | ") for each in lines if not each.startswith("| ---")]


def test_a_line_that_is_recorded_is_read_as_it_was(tmp_path: Path) -> None:
    recorder = Recorder("speed/compressors", tmp_path / "compressors.jsonl")
    link = {"mbit_per_s": 20.0, "delay_ms": 60.0}
    figures: record.Figures = {"ratio": (4.0, ""), "encode": (17.70000000004, "GB/s"), "decode": (None, "GB/s")}
    figures["fold"] = (math.nan, "GB/s")
    told = recorder.add(
        "int8", figures, seed=3, link=link, arguments={"values": 100, "spec": None, "both": True}, table="one"
    )
    recorder.add("fp16", {"ratio": (2, "")})
    first, second = record.read(recorder.path)
    assert first == told and first.figures == {"ratio": Figure(4.0), "encode": Figure(17.7, "GB/s")}
    assert (first.seed, first.link, first.arguments["both"], first.table) == (3, link, True, "one")
    assert (second.seed, second.link, second.source, second.note) == (None, None, "run", "")
    assert first.commit and first.date and first.python and first.torch and isinstance(first.load, float)
    assert first.machine is not None and first.machine["cores"] and isinstance(first.machine["ram_gb"], float)
    assert Recorder("speed/compressors", recorder.path).found(run="int8", seed=3, values=100) == [first]
    assert Recorder("speed/compressors", recorder.path).found(run="int8", values=101) == []


def test_a_table_has_the_median_and_the_spread_of_seeds_and_the_newest_commit_of_each() -> None:
    lines = [
        *(line("bsp", loss, seed) for seed, loss in enumerate((2.0, 2.2, 2.1))),
        line("bsp", 2.4, 1, "bbbbbbb"),
        line("ssp", 2.31, 0, busy=True, load=3.2, beside="bsp", note="beside tests"),
        line("ssp", 2.31, 0, arguments={"steps": 400, "rate": 0.004, "optimizer": "adamw", "size": "1.3M"}, busy=None),
    ]
    table = markdown(lines)
    assert table.startswith("All rows: steps 400; optimizer adamw; size 1.3M; link 20 Mbit/s, 60 ms.\n")
    assert rows(markdown([line("bsp", 2.1, beside="bsp"), *lines[-2:]])) == [
        ["run", "rate", "loss, nats a byte", "step, ms", "over bsp", "lines", "commit", "machine", "note"],
        ["bsp", "0.002", "2.100", "1,234", "", "1", "aaaaaaa", "idle machine", ""],
        ["ssp", "0.002", "2.310", "1,234", "+10.0 %", "1", "aaaaaaa", "busy machine, load 3.2", "beside tests"],
        ["ssp", "0.004", "2.310", "1,234", "+10.0 %", "1", "aaaaaaa", "load not told", ""],
    ]
    assert rows(table)[1] == [
        *("bsp", "0.002", "2.100 (2.000 to 2.400)", "1,234", "3", "aaaaaaa, bbbbbbb", "idle machine", ""),
    ]


def test_best_of_leaves_the_best_value_among_those_with_the_most_seeds() -> None:
    def at(rate: float, *losses: float) -> list[Line]:
        return [line("bsp", loss, seed, arguments={"rate": rate}, best_of="rate") for seed, loss in enumerate(losses)]

    table = markdown([*at(0.002, 2.0, 2.2), *at(0.0028, 2.05, 2.05), *at(0.004, 1.9)])
    assert table.startswith("All rows: rate 0.0028") and rows(table)[1][1] == "2.050"


def test_a_time_without_a_word_on_the_machine_is_not_called_idle() -> None:
    losses = Line("loss/x", "bsp", {"loss": Figure(2.0, "nats a byte")}, seed=1, busy=True)
    assert record.machine_text([line("bsp", 2.0), losses]) == "idle machine"
    assert record.machine_text([losses]) == "busy machine"
    assert record.machine_text([line("bsp", 2.0, busy=None)]) == "load not told"


def good(**more: Any) -> str:
    return json.dumps({"bench": "a/b", "run": "c", "figures": {"loss": {"value": 1}}} | more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"bench": "a/b", ', "is no JSON"),
        ("[1]", "is no object"),
        (good(speed=3), "has the unknown field 'speed'"),
        (good(run=""), "has no run"),
        (good(figures={}), "has no figures"),
        (good(seed="0"), "has seed '0', which is no int or NoneType"),
        (good(load="idle"), "has load 'idle', which is no float or NoneType"),
        (good(figures={"loss": 1.5}), "has the figure 'loss' as 1.5"),
        (good(figures={"loss": {"value": "1.5"}}), "has the figure 'loss' as {'value': '1.5'}"),
        (good(figures={"loss": {"value": 1, "units": "s"}}), "has the figure 'loss'"),
    ],
)
def test_a_malformed_line_is_one_sentence_with_its_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wan.jsonl"
    path.write_text(f"{good()}\n{text}\n{good()}\n")
    with pytest.raises(RecordError, match=r"^[^\n]*; mend the line or delete it$") as error:
        record.read(path)
    assert str(error.value).startswith(f"{path}, line 2 ") and said in str(error.value)
    assert line_of(good()).figures == {"loss": Figure(1)}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two results and the pages of none."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("above\n\n<!-- results: begin -->\nold\n<!-- results: end -->\n\nbelow\n")
    (tmp_path / "docs" / "results.md").write_text("old\n")
    lines = [
        line("ddp", 1.9),
        line("ddp", 1.8, arguments={"steps": 400, "rate": 0.004, "optimizer": "adamw", "size": "1.3M"}),
    ]
    lines += [
        line("local H=20 iso int8", 2.0, busy=True, arguments=LATE),
        line("local H=20 iso int8", 1.7, arguments={"steps": 40, "optimizer": "adamw", "size": "1.3M"}),
    ]
    text = "".join(json.dumps(each.told()) + "\n" for each in lines)
    (tmp_path / "results" / "wan.jsonl").write_text(text)
    ends = {f"{way} beyond": Figure(models, "models") for way, models in (("up", 0.0002), ("down", 1.77))}
    told = Line("speed/start_and_end", "local dense", ends, commit="aaaaaaa", machine=MACHINE).told()
    (tmp_path / "results" / "start_and_end.jsonl").write_text(json.dumps(told) + "\n")
    paces = [
        Line("speed/pace", "DDP", {"utilisation": Figure(share, "%")}, f"{workers} workers at a GPU's pace", link=link)
        for workers, share, mbit in ((2, 0.5, 50.0), (2, 0.0859, 50.0), (2, 1.263, 1000.0), (4, 9.0, 50.0))
        for link in ({"mbit_per_s": mbit, "delay_ms": 10.0},)
    ]
    paces.append(
        Line("speed/pace", "local, H = 48, 4 fragments, 2bit", paces[0].figures, paces[0].table, link=paces[0].link)
    )
    text = "".join(json.dumps(each.told()) + "\n" for each in paces)
    (tmp_path / "results" / "pace.jsonl").write_text(text)
    for name, path in (("RESULTS", "results"), ("README", "README.md"), ("PAGE", "docs/results.md")):
        monkeypatch.setattr(report, name, tmp_path / path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def test_the_pages_have_what_the_lines_say(house: Path) -> None:
    told = CliRunner().invoke(report.main, [])
    assert told.exit_code == 0 and told.output == "wrote docs/results.md\nwrote README.md\n"
    page, readme = ((house / name).read_text() for name in ("docs/results.md", "README.md"))
    assert "\n## wan\n" in page
    assert ["ddp", "400", "0.002", "-", "1.900", "1,234", "1", "aaaaaaa", "idle machine"] in rows(page)
    assert readme.startswith("above\n\n<!--") and readme.endswith("-->\n\nbelow\n") and "old" not in readme
    table = {cells[0]: cells[1:] for cells in rows(readme)}
    assert table["run"] == ["best rate", "ms a step: median", "mean", "kB a step up", "loss", "seconds to loss 2.1",
                            "GPU %: 50, 1,000 Mbit/s", "models, start, end"]  # fmt: skip
    assert table["PyTorch DDP over gloo"] == ["0.004", "1,234", "-", "-", "1.800", "-", "0.086, 1.3", "-"]
    # A step of a busy machine is not taken, and neither is a loss of 40 steps.
    assert table["Narrows, local, H = 20, `--outer iso`, `int8`"] == [
        *("0.002, beta1 0.8", "-", "-", "-", "2.000", "-", "0.5, - (H = 48, `2bit`)", "-"),
    ]
    assert table["torchft 0.2.0, DiLoCo, 50 local steps"] == ["-"] * 8


def test_check_fails_on_a_page_that_the_data_does_not_give(house: Path) -> None:
    assert CliRunner().invoke(report.main, ["--check"]).exit_code == 1  # nothing was written yet
    assert CliRunner().invoke(report.main, []).exit_code == 0
    assert CliRunner().invoke(report.main, ["--check"]).output == ""
    for name in ("docs/results.md", "README.md"):
        right = (house / name).read_text()
        (house / name).write_text(re.sub("1.[89]00", "1.799", right, count=1))
        told = CliRunner().invoke(report.main, ["--check"])
        assert (told.exit_code, told.output) == (
            1,
            f"Error: {Path(name).name} is not what bench/results/ gives: run python -m bench.report\n",
        )
        (house / name).write_text(right)
    (house / "README.md").write_text("no markers\n")
    assert "README.md has to have <!-- results: begin -->" in CliRunner().invoke(report.main, ["--check"]).output


def test_a_bench_is_run_first_and_the_pages_stay_where_it_fails(house: Path) -> None:
    adds = house / "adds.py"
    adds.write_text("import sys\nopen('results/x.jsonl', 'w').write(sys.argv[2]); sys.exit(int(sys.argv[1]))\n")
    told = CliRunner().invoke(report.main, [str(adds), "3", good()])
    assert told.exit_code == 1 and f"{adds} ended with 3" in told.output
    assert (house / "docs" / "results.md").read_text() == "old\n"
    assert CliRunner().invoke(report.main, [str(adds), "0", good()]).exit_code == 0
    assert "\n## b\n\nThe script `bench/a/b.py` is gone." in (house / "docs" / "results.md").read_text()


def test_the_pages_are_those_of_the_data() -> None:
    assert report.pages(record.RESULTS, report.README.read_text("utf-8"))[report.README] == report.README.read_text(
        "utf-8"
    )
    found = report.sections(record.RESULTS)
    assert report.page(found) == report.PAGE.read_text("utf-8")
    archived = [line for lines in found.values() for line in lines if line.source == "archive"]
    assert len(archived) > 200 and all(line.date is None for line in archived)
