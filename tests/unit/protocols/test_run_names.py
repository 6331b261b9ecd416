"""The name of a run: who is refused, and that the refusal names both runs and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.run_name import other_run
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Send
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.wire import pack
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.command.managers.run_commands import RunCommands
from narrows.ps.command.serve import check_folder
from narrows.ps.coordinator.coordinator import Coordinator

NAMED = Settings(name="oslo").validated()
ARRAYS = {"x": np.zeros(3, np.float32), "p": np.zeros(3, np.float32)}
FACTS = {"publication": 3, "plan": b""}  # which every checkpoint has


@pytest.mark.parametrize("name", ["a", "A1", "2026-11-28_gpt.large", "x" * 64])
def test_a_name_arrives_with_the_settings(name: str) -> None:
    assert Settings.unpacked(Settings(name=name).validated().packed()).name == name


@pytest.mark.parametrize("name", [" ", "-a", ".", "a b", "a\nb", "a\x1b[2J", "ä", "x" * 65, "a/b", "\u202e"])
def test_what_is_no_name_is_refused_of_a_user_and_of_a_server(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--name '.{0,99}: a name has at most 64 letters, digits and \. _ -"):
        Settings(name=name).validated()
    with pytest.raises(RemoteProtocolError, match="the server's settings are not valid: --name"):
        Settings.unpacked(Settings(name=name).packed())


@pytest.mark.parametrize(("ours", "theirs", "why"), [
    ("oslo", "oslo", ""),
    ("", "", ""),
    ("jena", "oslo", "--name jena: the run of this server has the name oslo: give --name oslo to join it, or the address of "
     "the server of jena"),
    ("", "oslo", "the run of this server has the name oslo, and no --name was given here: give --name oslo to join it, or the "
     "address of the other run's server"),
    ("jena", "", "--name jena: the run of this server has no name: leave --name out to join it, or start its server with "
     "--name jena"),
    ("a\x1b[2J" * 300, "oslo", "the flags have a --name that is no name of a run"),
    (7, "", "the flags have a --name that is no name of a run"),
    (None, "oslo", "the flags have a --name that is no name of a run"),
])  # fmt: skip
def test_both_names_and_the_way_out_are_in_the_sentence(ours: Any, theirs: str, why: str) -> None:
    assert other_run(ours, theirs) == why


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize(("flags", "admitted"), [
    ({"name": "oslo"}, True),
    ({"name": "jena"}, False),
    ({"sync": "ssp"}, False),
    (None, False),
])  # fmt: skip
def test_a_coordinator_refuses_members_of_other_runs_also_once_its_run_is_over(
    flags: dict[str, Any] | None, admitted: bool, over: bool
) -> None:
    ours = Coordinator(NAMED, 1)
    if over:
        ours.run.move("start")
        ours.run.move("end")
        assert ours.run.over
    effects = ours.handle(b"peer", m.Hello("0", "here", b"" if flags is None else pack(flags)), 0)
    refused = [each.message.code for each in effects if isinstance(each, Send) and isinstance(each.message, m.Refuse)]
    assert refused == ([m.RefuseCode.OVER] if admitted and over else [] if admitted else [m.RefuseCode.INCOMPATIBLE])
    assert [*ours.members.waiting] == (["0"] if admitted and not over else [])


@pytest.mark.parametrize("kept", ["oslo", "", None])
def test_checkpoints_of_another_run_are_not_resumed(kept: str | None, tmp_path: Path) -> None:
    """None: they are of a release whose settings have no name."""
    settings = b"" if kept is None else Settings(name=kept).validated().packed()
    check_folder(tmp_path, "jena")  # it is empty
    checkpoint_files.write(tmp_path, 0, 5, ARRAYS, FACTS | {"settings": settings})
    check_folder(tmp_path, "oslo")
    if not kept:
        return check_folder(tmp_path, "")
    with pytest.raises(
        UsageError, match="checkpoints of the run oslo, and --name jena was given: give --name oslo to go on"
    ):
        check_folder(tmp_path, "jena")
    with pytest.raises(UsageError, match="and no --name was given: give --name oslo to go on"):
        check_folder(tmp_path, "")
    checkpoint_files.write(tmp_path, 0, 9, ARRAYS, FACTS | {"settings": b"\xc1"})
    assert checkpoint_files.run_name(tmp_path) == "oslo", "the newest that can be read"


def test_the_workers_of_a_printed_job_name_its_run() -> None:
    named = RunCommands("h", 5555, 2, 1, {"name": "oslo"}, "")
    assert "--name oslo" in " ".join(named.serve("f", "id")) and "--name oslo" in " ".join(named.work("h", ""))
    assert "--name" not in RunCommands("h", 5555, 2, 1, {}, "").work("h", "")
