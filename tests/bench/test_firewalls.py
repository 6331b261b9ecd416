"""bench/faults/firewalls.py: the firewalls shut all but what is let in, and a run goes through one port of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from faults import firewalls
from faults.firewalls import MANY, ONE, PORT, PROBED, dropped, fortify, main, prove, reachable
from lab import netns, record
from lab.launch import CommandFailed
from lab.link import Way

needs_nft = pytest.mark.skipif(bool(firewalls.available()), reason=firewalls.available() or "available")
WORDS = ["--rounds", "1", "--steps", "3", "--size", "0.25"]


@needs_nft
def test_a_firewall_lets_in_what_it_says_and_drops_the_rest() -> None:
    with netns.pair(Way(100e6, 0.001)) as lab:
        first, second = lab.hosts
        assert reachable(first, second, PROBED) == set(PROBED)
        fortify(first, [PORT])
        fortify(second, [])
        prove(lab.hosts, ([PORT], []))
        assert dropped(first) >= len(PROBED) - 1 and dropped(second) >= len(PROBED)
        assert reachable(first, first, PROBED) == set(PROBED), "loopback"
        with pytest.raises(CommandFailed, match="lets in"):
            prove(lab.hosts, ([PORT, PORT + 1], []))


@needs_nft
def test_a_run_and_its_standby_go_through_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.setpriority", lambda *args: None)
    out = tmp_path / "firewalls.jsonl"
    told = CliRunner().invoke(main, [*WORDS, "--limit", "9", "--rows", "bsp", "--out", str(out)])
    assert told.exit_code == 0, told.output
    many, one = record.read(out)
    assert (many.run, one.run) == (MANY, ONE) and f"bsp: {MANY} " in told.output
    for line in (many, one):
        assert line.figures["dropped"].value == 0 and line.figures["step"].value > 20
        assert line.figures["turn"].value > 0.1


@pytest.mark.parametrize(("steps", "code"), [((100.0, 102.0), 0), ((100.0, 104.0), 1)])
def test_a_step_beyond_the_limit_is_said(
    steps: tuple[float, float], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*args: object) -> list[tuple[str, record.Figures]]:
        return [(way, {"step": (step, "ms")}) for way, step in zip((MANY, ONE), steps, strict=True) for _ in range(3)]

    monkeypatch.setattr(firewalls, "available", lambda: "")
    monkeypatch.setattr(firewalls, "measure", measure)
    monkeypatch.setattr("os.setpriority", lambda *args: None)
    told = CliRunner().invoke(main, ["--rows", "bsp", "--out", str(tmp_path / "out")])
    assert told.exit_code == code, told.output
    assert f"{steps[1] / 100:.4f} (rounds: " in told.output and ("over 1.03" in told.output) == bool(code)
    assert [line.run for line in record.read(tmp_path / "out")] == [MANY] * 3 + [ONE] * 3
