"""What ps-worker tells a worker arrives as it was sent, by environment variables; a wrong variable is named."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest

from narrows.protocols.errors import UsageError
from narrows.protocols.wire import pack, unpack
from narrows.worker.runtime.config import DEFAULTS, INHERITED, PRIVATE, VARIABLES, WorkerConfig, take, told

FULL = WorkerConfig(
    *("tcp://h:1", "token", b"\x81\x00", "/k", 2.5, 60.0, True, 7, "/c", "/m", "cuda:1", "host", 3, True),
    *(("RANK", "WORLD_SIZE"), "/plan.json", 1, 0, 32),
    watch=("dense", "topk:0.01"),
    tty="/dev/pts/1",
    debug=True,
)  # fmt: skip


def test_a_config_arrives_as_it_was_sent() -> None:
    assert WorkerConfig.from_environment({}) == WorkerConfig()
    assert WorkerConfig.from_environment(FULL.into({})) == FULL
    passed = {"NARROWS_PARENT_FD": "4", "NARROWS_RECORD_FD": "0", "NARROWS_STARTED_BY": "17,9"}  # by ChildProcesses
    found = WorkerConfig.from_environment(FULL.into({}) | passed)
    assert found == replace(FULL, parent_fd=4, record_fd=0, started_by=(17, 9))


def test_each_field_has_a_variable_of_its_own() -> None:
    assert [*VARIABLES] == [each.name for each in fields(WorkerConfig)] == [*DEFAULTS]
    assert len({variable.name for variable in VARIABLES.values()}) == len(VARIABLES)


def test_what_a_process_is_not_told_it_does_not_inherit() -> None:
    """But for what has no flag: the user sets it for ps-worker, and means its workers."""
    above = FULL.into({"PATH": "/bin", "NARROWS_SYNC": "bsp"})
    kept = WorkerConfig(server="tcp://h:2").into(above)
    assert kept["PATH"] == "/bin" and kept["NARROWS_SYNC"] == "bsp" and kept["NARROWS_SERVER"] == "tcp://h:2"
    inherited = {name: getattr(FULL, name) for name in INHERITED}
    assert WorkerConfig.from_environment(kept) == WorkerConfig(server="tcp://h:2", **inherited)


@pytest.mark.parametrize(("name", "text", "why"), [
    ("skip_limit", "0", "NARROWS_SKIP_LIMIT=0: give the number of steps, at least 1"),
    ("skip_limit", "-1", "at least 1"),
    ("connect_timeout", "soon", "NARROWS_CONNECT_TIMEOUT=soon: give a positive number of seconds"),
    ("server_timeout", "nan", "a positive number"),
    ("server_timeout", "0", "a positive number"),
    ("local_rank", "first", "NARROWS_LOCAL_RANK=first: give the number of this process on its machine"),
    ("expect", "xy", "NARROWS_EXPECT=xy: the two commands set it among their own processes; unset it"),
    ("started_by", "1;2", "unset it"),
])  # fmt: skip
def test_a_variable_that_is_wrong_is_named(name: str, text: str, why: str) -> None:
    env = {VARIABLES[name].name: text}
    with pytest.raises(UsageError, match=why):
        told(name, env)
    with pytest.raises(UsageError, match=why):
        WorkerConfig.from_environment(env)


@pytest.mark.parametrize(("text", "group"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_a_group_is_on_unless_it_says_no(text: str, group: bool) -> None:
    assert told("group", {"NARROWS_GROUP": text}) is group


def test_what_is_the_sessions_own_is_not_left_to_the_processes_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (replace(FULL, parent_fd=5).into({}) | {"NARROWS_RECORD_FD": "6"}).items():
        monkeypatch.setenv(name, value)
    assert WorkerConfig.taken() == replace(FULL, parent_fd=5, record_fd=6)
    left = WorkerConfig.from_environment(os.environ)
    assert left == replace(FULL, record_fd=6, **{name: DEFAULTS[name] for name in PRIVATE})
    assert take("record_fd") == 6 and take("record_fd") == -1


def test_a_script_under_plain_python_names_its_run_by_a_variable_and_ps_worker_wins_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NARROWS_NAME", "oslo")
    assert unpack(WorkerConfig.taken().expect) == {"name": "oslo"}
    monkeypatch.setenv("NARROWS_EXPECT", pack({"sync": "bsp"}).hex())
    assert unpack(WorkerConfig.taken().expect) == {"name": "oslo", "sync": "bsp"}
    monkeypatch.setenv("NARROWS_EXPECT", pack({"name": "jena"}).hex())
    assert unpack(WorkerConfig.taken().expect) == {"name": "jena"}
    monkeypatch.setenv("NARROWS_NAME", "a\nb")
    with pytest.raises(UsageError, match=r"NARROWS_NAME: 'a\\nb': a name has at most 64 letters"):
        WorkerConfig.taken()
