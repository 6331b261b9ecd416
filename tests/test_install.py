"""The versions that `make` installs: lock.txt beside pyproject.toml and constraints.txt."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from narrows import worker

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")  # that the install was tried on


def pins(file: str) -> list[Requirement]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def asked(extras: set[str]) -> list[Requirement]:
    """The dependencies of Narrows with these extras, its own extras resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = [Requirement(each) for each in project["dependencies"]]
    for extra in extras:
        for each in map(Requirement, project["optional-dependencies"][extra]):
            found += asked(each.extras) if each.name == project["name"] else [each]
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_one_version_that_pyproject_admits(python: str) -> None:
    locked: dict[str, list[str]] = {}
    for pin in pins("lock.txt"):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (specifier,) = pin.specifier
            locked.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    wanted = asked({"bench", "cuda", "dev"})
    assert len(wanted) > 20
    for each in wanted:
        (version,) = locked[canonicalize_name(each.name)]
        assert each.specifier.contains(version), f"{each} has {version}"


def test_torch_is_the_one_of_the_environments_beside() -> None:
    (torch,) = pins("constraints.txt")
    assert torch.name == "torch" and torch in pins("lock.txt")


def test_make_brings_a_pip_that_can_resolve_torch_s_cuda_packages() -> None:
    """The one that Python 3.11 and 3.12 have, 23.2, takes cuda-toolkit 13.0.3.0 for another version than 13.0.3."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (pip,) = re.findall(r"^PIP := (\d+)\.", makefile, re.M)
    assert int(pip) >= 24 and "pip install -q pip==$(PIP)" in makefile
    assert len(re.findall(r"^\t\.venv/bin/python -m pip install .*-c (?:lock|constraints)\.txt", makefile, re.M)) >= 2


def test_a_script_can_ask_for_the_version() -> None:
    assert worker.__version__ == importlib.metadata.version("narrows")
