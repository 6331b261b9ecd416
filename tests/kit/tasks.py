"""Loads the scripts of bench/tasks as modules, for their data and models."""

import importlib.util
from pathlib import Path
from types import ModuleType

TASKS = Path(__file__).parents[2] / "bench" / "tasks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TASKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
