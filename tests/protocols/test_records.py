"""protocols/runtime/records.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime import records


def test_the_record_of_an_earlier_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "run.jsonl", list[str]()
    for run in range(3):
        with records.open_record(str(path), said.append) as file:
            file.write(f"run {run}")
    assert [(tmp_path / f"run.jsonl{end}").read_text() for end in (".1", ".2", "")] == ["run 0", "run 1", "run 2"]
    assert said == [f"the record of an earlier run is kept as {path}.{n}" for n in (1, 2)]
    monkeypatch.setattr(records, "KEPT_MAX", 2)
    with pytest.raises(UsageError, match="2 older ones are beside it"):
        records.open_record(str(path), said.append)
    assert path.read_text() == "run 2"


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    said = list[str]()
    records.open_record("/dev/null", said.append).close()
    (tmp_path / "empty").touch()
    records.open_record(str(tmp_path / "empty"), said.append).close()
    assert not said
