"""Where compiled kernels are kept: compression/kernels/jit.py."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numba.core import caching

from narrows.compression.kernels import jit

SOURCE = "from narrows.compression.kernels.jit import kernel\n@kernel\ndef twice(x: int) -> int:\n    return 2 * x\n"
IN_TREE: Any = caching.CacheImpl._locator_classes[1]


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    jit.own_folder.cache_clear()
    yield
    jit.own_folder.cache_clear()


def module(folder: Path) -> ModuleType:
    """A module with one kernel, as it is imported anew."""
    (folder / "doubling.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", folder / "doubling.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def read_only(monkeypatch: pytest.MonkeyPatch, packages: Path) -> None:
    """The installation cannot be written."""
    ensured = IN_TREE.ensure_cache_path

    def ensure(self: Any) -> None:
        if str(packages) in self.get_cache_path():
            raise PermissionError
        ensured(self)

    monkeypatch.setattr(IN_TREE, "ensure_cache_path", ensure)


def test_a_kernel_that_was_compiled_by_root_is_taken_where_its_place_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, home = tmp_path / "packages", tmp_path / "home"
    packages.mkdir()
    assert module(packages).twice(3) == 6
    (index,) = packages.glob("__pycache__/*.nbi")
    monkeypatch.setenv("HOME", str(home))
    read_only(monkeypatch, packages)
    again = module(packages).twice
    assert again(3) == 6 and again.stats.cache_hits, "it is compiled a second time"
    assert [path.name for path in (home / ".cache" / "narrows").glob("*/*.nbi")] == [index.name]


def test_without_any_folder_kernels_are_compiled_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(monkeypatch, tmp_path)
    monkeypatch.setattr(jit, "own_folder", lambda: None)
    assert module(tmp_path).twice(3) == 6
    assert not [*tmp_path.glob("__pycache__/*.nb?")]
    monkeypatch.undo()


def test_a_folder_that_another_can_write_to_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is code. In /tmp anybody may have made a folder of our name."""
    for variable, name in (("HOME", "home"), ("TMPDIR", "tmp")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    foreign, ours = tmp_path / "home" / ".cache" / "narrows", tmp_path / "tmp" / f"narrows-kernels-{os.getuid()}"
    foreign.mkdir(parents=True)
    foreign.chmod(0o777)
    assert jit.own_folder() == ours and ours.stat().st_mode & 0o777 == 0o700
    jit.own_folder.cache_clear()
    ours.rmdir()
    ours.symlink_to(tmp_path)
    assert jit.own_folder() not in (ours, foreign)


def test_a_home_without_a_path_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user id that no file of users has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", str)
    folder = jit.own_folder()
    assert folder is not None and folder.is_absolute() and not [*tmp_path.iterdir()]
