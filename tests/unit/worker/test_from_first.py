"""What the first process of a machine tells the others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from narrows.worker.runtime import device


def test_the_text_of_the_first_process_is_that_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first waits for it, and without a folder, or past the limit, there is none."""
    monkeypatch.setenv("NARROWS_MACHINE_DIR", str(tmp_path))
    monkeypatch.setattr(device, "LOOK_S", 0.001)
    ranks = {"first": 0, "second": 1, "third": 2}
    monkeypatch.setattr(device, "local_rank", lambda: ranks[threading.current_thread().name])
    found: dict[str, str | None] = {}

    def work() -> None:
        name = threading.current_thread().name
        found[name] = device.from_first("best", f"of the {name}")

    threads = [threading.Thread(target=work, name=name) for name in ("second", "third", "first")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert found == dict.fromkeys(ranks, "of the first")
    monkeypatch.setattr(device, "local_rank", lambda: 1)
    monkeypatch.setattr(device, "TOLD_LIMIT_S", 0.01)
    assert device.from_first("worst", "") is None
    monkeypatch.setenv("NARROWS_MACHINE_DIR", "")
    assert device.from_first("best", "") is None
