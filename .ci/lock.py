"""Write lock.txt: the versions that `make` installs, for each Python that Narrows is tested on.

`make lock` runs this with one interpreter a Python. pip resolves pyproject.toml's extras once for each; a version that differs
between Pythons gets a marker. The version of torch is the one that constraints.txt names. Run it where pip takes torch from the
package index: a build for the CPU names no CUDA package.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "lock.txt"
EXTRAS = "bench,cuda,dev,docs"
HEAD = """\
# The versions that `make` installs, so that a result does not depend on the day: written by `make lock`.
# pyproject.toml says with which versions Narrows works.
"""


def resolved(python: str, torch: str) -> dict[str, str]:
    """The versions that pip chooses for `python`, by package name.

    Raises CalledProcessError where pip finds no set of versions.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
        ]
        subprocess.run([*pip, "-e", f"{ROOT}[{EXTRAS}]", f"torch=={torch}"], check=True)
        found = json.loads(report.read_text("utf-8"))["install"]
    versions = {re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(): each["metadata"]["version"] for each in found}
    del versions["narrows"]
    return versions


def lines(versions: dict[str, dict[str, str]]) -> list[str]:
    """One line a package where all Pythons agree, else one line a Python; `versions` is by Python's minor version."""
    found = []
    for name in sorted({name for each in versions.values() for name in each}):
        by_python = {minor: each[name] for minor, each in versions.items() if name in each}
        if len(set(by_python.values())) == 1:
            found.append(f"{name}=={next(iter(by_python.values()))}")
            continue
        for minor, version in by_python.items():
            found.append(f"{name}=={version}; python_version == '{minor}'")
    return found


def main(pythons: list[str]) -> None:
    (torch,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text("utf-8"), re.M)
    versions = {}
    for python in pythons:
        asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        minor = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        versions[minor] = resolved(python, torch) | {"torch": torch}
    LOCK.write_text(HEAD + "\n".join(lines(versions)) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
