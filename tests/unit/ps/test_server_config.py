"""What ps-serve tells a shard process arrives as it was sent, and a config that is not whole is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import LocalProtocolError
from narrows.ps.process.config import JOURNAL, ServerConfig

PLAIN = ServerConfig(1, Settings(shards=2).validated(), "tcp://127.0.0.1:0", "tcp://127.0.0.1:7", 9, "kept", True)
FULL = replace(PLAIN, parent_timeout=2.5, done=(0, 3), away=((1, "leipzig"),), watched=True, seals=1e9, secret="s")


@pytest.mark.parametrize("config", [PLAIN, FULL])
def test_a_config_arrives_as_it_was_sent(config: ServerConfig) -> None:
    assert "\n" not in config.encode()
    assert ServerConfig.decode(config.encode(), {}) == config
    with_journal = ServerConfig.decode(config.encode(), dict(zip(JOURNAL, "3456789", strict=True)))
    assert with_journal == replace(config, journal=(3, 4, 5, 6, 7, 8, 9))
    assert with_journal.encode() == config.encode(), "descriptors are those of one process"


FAULTS: dict[str, Any] = {"index": "1", "resume": 1, "bind": None, "first_epoch": 1.5, "done": 3, "away": [1], "new": 0}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_field_is_named(name: str) -> None:
    told = json.loads(FULL.encode()) | {name: FAULTS[name]}
    with pytest.raises(LocalProtocolError, match=r"the config of a shard"):
        ServerConfig.decode(json.dumps(told), {})


@pytest.mark.parametrize("line", ["", "{", "[]", "{}"])
def test_a_line_that_is_no_config_is_refused(line: str) -> None:
    with pytest.raises(LocalProtocolError, match="the config of a shard cannot be read"):
        ServerConfig.decode(line, {})


def test_a_standby_takes_from_its_primary_what_it_must() -> None:
    answer = {"secret": "other", "parent": "tcp://p:1", "parent_timeout": 1.0, "first_epoch": 3, "replicas": 1, "x": 0}
    theirs = FULL.of_standby(answer)
    changed = {each.name for each in fields(theirs) if getattr(theirs, each.name) != getattr(FULL, each.name)}
    assert changed == answer.keys() - {"x"}
