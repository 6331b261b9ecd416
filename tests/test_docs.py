"""The house rules of the pages: their length, and that each file, link and test they name exists."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from narrows import worker
from narrows.worker import DistributedOptimizer

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = {"README.md": 130, "docs/architecture.md": 200, "docs/glossary.md": 150}
CHARACTERS_MAX = {"README.md": 140}  # of a line
PRODUCT = ("protocols", "compression", "ps", "worker")
OTHERS = {"LOCAL_RANK"}  # names of other programs on the page of the glossary
NAMING = ("To change ..., look in", "Ten tasks")  # sections of docs/architecture.md that name files

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:protocols|compression|ps|worker|tests|bench)/[\w/]*(?:\.\w+)?)`")


def pages() -> list[str]:
    found = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found]


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def anchor(heading: str) -> str:
    """The name under which a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: str) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+\s+(.*)$", page, flags=re.M)}


def broken(path: str, page: str) -> list[str]:
    """Relative links that lead nowhere."""
    found = []
    for link in LINK.findall(without_code(page)):
        file, _, name = link.partition("#")
        target = (ROOT / path).parent / file if file else ROOT / path
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (name and target.suffix == ".md" and name not in anchors(target.read_text("utf-8"))):
            found.append(link)
    return found


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def missing(text: str) -> list[str]:
    """Files and folders that are named, and are not there."""
    return [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


def names_of(source: str) -> Iterator[str]:
    """The classes of a module with their methods and annotated fields, and the module's constants."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name, body=body):
                yield name
                for each in body:
                    match each:
                        case ast.FunctionDef(method):
                            yield f"{name}.{method}"
                        case ast.AnnAssign(ast.Name(field)):
                            yield f"{name}.{field}"
                        case _:
                            pass
            case ast.Assign([ast.Name(constant)]) | ast.AnnAssign(ast.Name(constant)):
                yield constant
            case _:
                pass


def unnamed(text: str, names: set[str]) -> list[str]:
    """Classes and constants that a page names in backticks, and no module has."""
    return [name for name in re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", text) if name not in names]


@pytest.mark.parametrize("path", LINES_MAX)
def test_a_page_is_not_too_long(path: str) -> None:
    lines = len((ROOT / path).read_text("utf-8").splitlines())
    assert lines <= LINES_MAX[path], f"{path} has {lines} lines, of at most {LINES_MAX[path]}"


@pytest.mark.parametrize("path", CHARACTERS_MAX)
def test_a_line_is_not_too_long(path: str) -> None:
    lines = (ROOT / path).read_text("utf-8").splitlines()
    assert [line for line in lines if len(line) > CHARACTERS_MAX[path]] == []


@pytest.mark.parametrize("heading", NAMING)
def test_files_that_are_named_are_there(heading: str) -> None:
    text = section((ROOT / "docs/architecture.md").read_text("utf-8"), heading)
    assert len(NAMED.findall(text)) >= 10
    assert not missing(text)


def test_the_glossary_names_classes_and_files_that_are_there() -> None:
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    sources = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    names = {name for file in sources for name in names_of(file.read_text("utf-8"))}
    assert len(re.findall(r"`[A-Z]\w*`", text)) > 100
    assert not missing(text) and not unnamed(text, names | OTHERS)


def test_each_guarantee_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs/guarantees.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    named = re.findall(r"\| (?:(tests/\S+\.py): (test_\w+)|the same) \|$", "\n".join(rows), re.M)
    assert len(named) == len(rows) > 20
    for file, name in named:
        assert not file or f"def {name}(" in (ROOT / file).read_text("utf-8"), f"{file} has no {name}"


def public() -> dict[str, Any]:
    """The public names of narrows.worker and their objects, as docs/api.md writes them."""
    methods = {f".{name}": value for name, value in vars(DistributedOptimizer).items() if inspect.isroutine(value)}
    found = {name: getattr(worker, name) for name in worker.__all__} | methods
    return {name: value for name, value in found.items() if not name.startswith("._")}


@pytest.mark.parametrize("name", public())
def test_each_public_name_and_argument_is_on_the_page_of_the_api(name: str) -> None:
    signature = inspect.signature(public()[name])
    asked = {each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD} - {"self"}
    page = (ROOT / "docs/api.md").read_text("utf-8")
    said = re.findall(rf"^(?:\| )?`{re.escape(name)}\(([^`]*)\)`", page, re.M)
    # Two classes may have a method of one name.
    assert any(asked <= {*re.findall(r"\w+", each)} for each in said)


@pytest.mark.parametrize("path", pages())
def test_links_lead_somewhere(path: str) -> None:
    assert not broken(path, (ROOT / path).read_text("utf-8"))


def test_what_is_not_there_is_found() -> None:
    names = {*names_of("A: int = 1\nB = 2\nclass C:\n    field: int\n    def method(self): ...")}
    assert names == {"A", "B", "C", "C.field", "C.method"}
    assert unnamed("`C`, `B`, `C.method`, `lower`, `--flag`, `Made`, `C.up`", names) == ["Made", "C.up"]
    assert missing("`ps/store/store.py` and `ps/shop.py`, `worker/`") == ["ps/shop.py"]
    links = "[a](modes.md) [b](mode.md) [c](#one) [d](#two) [e](https://example.org) [f](glossary.md#synchronization)\n# One\n"
    assert broken("docs/made-up.md", links) == ["mode.md", "#one", "#two"]


def test_the_servers_of_two_cities_may_share_a_machine() -> None:
    """README's recipe: the root stands in one of the cities."""
    lines = re.findall(
        r"^    (ps-\w+ .*?)(?:  #.*)?$", section((ROOT / "README.md").read_text("utf-8"), "Two cities"), re.M
    )
    servers = [line for line in lines if line.startswith("ps-serve")]
    ports = list[int]()
    for line in servers:
        bound, shards = re.search(r"--bind \S+:(\d+)", line), re.search(r"--shards (\d+)", line)
        begin = int(bound[1]) if bound else 5555
        ports += range(begin, begin + int(shards[1] if shards else 1))
    assert len(servers) == 2 and len(set(ports)) == len(ports), ports
    (worker_line,) = [line for line in lines if line.startswith("ps-worker")]
    assert re.search(r"--server tcp://127.0.0.1:(\d+)", worker_line)[1] == str(ports[2])  # type: ignore[index]
