"""The house rules of the pages: their length, and that each file, link and test they name exists."""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from narrows import worker
from narrows.ps.command import cli as serve_cli
from narrows.ps.command import plot, top
from narrows.ps.command.planning import plan, probe
from narrows.worker import DistributedOptimizer
from narrows.worker.command import cli as worker_cli
from narrows.worker.command import teach

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = {"README.md": 130, "docs/architecture.md": 200, "docs/glossary.md": 150}
CHARACTERS_MAX = {"README.md": 140}  # of a line
PRODUCT = ("protocols", "compression", "ps", "worker")
OTHERS = {"LOCAL_RANK"}  # names of other programs on the page of the glossary
COMMANDS: dict[str, click.Command] = {
    "ps-serve": serve_cli.command,
    "ps-worker": worker_cli.command,
    "ps-top": top.command,
    "ps-plot": plot.command,
    "ps-probe": probe.command,
    "ps-plan": plan.command,
    "ps-teach": teach.command,
}
NAMING = ("To find", "To add or change")  # sections of docs/architecture.md that name files, with classes and functions
CELL_MAX = 120  # characters in a cell of docs/architecture.md

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:protocols|compression|ps|worker|tests|bench)/[\w/]*(?:\.\w+)?)`")


def script_of_docs(name: str) -> Any:
    """A script of docs/ as a module. docs/ is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


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


def interrupted(page: str) -> list[str]:
    """Lines that begin a list or a table right behind a line of text: the site and the repository read them differently."""
    found, before = [], ""
    for line in without_code(page).splitlines():
        items = r"(- |\d+\. )"
        opens = re.match(items, line) and not re.match(items + "|  ", before)
        if before.strip() and (opens or (line.startswith("| ") and not before.startswith(("|", "<!--")))):
            found.append(line)
        before = line
    return found


def flags_of(command: click.Command) -> set[str]:
    """The flags of a command and of its subcommands, with --help."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {"--help", "--version"}.union(own, *map(flags_of, below))


def lines_of_commands(page: str) -> list[list[str]]:
    """The ps-* commands in code blocks of a page, as words. A line that ends with a backslash goes on in the next."""
    fenced = re.findall(r"^```(?:sh|bash|text)?\n(.*?)^```", page, re.M | re.S)
    indented = re.findall(r"^(?: {4}.*\n)+", without_code(page), re.M)
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    found = [
        re.split(r"(?:^|[\s/;&])(?=ps-(?:serve|worker|top|plot|probe|plan|teach)\s)", line.split("  #")[0])
        for line in lines
    ]
    return [re.split(r"&&|[|>]", part)[0].split() for parts in found for part in parts[1:]]


def unknown_flags(words: list[str]) -> list[str]:
    """The flags of a ps-* command that it does not have. What follows a script is the script's."""
    known, found = flags_of(COMMANDS[words[0]]), list[str]()
    for word in words[1:]:
        if word.endswith(".py") or word == "SCRIPT.py":
            break
        flag = word.partition("=")[0].strip("[]'")
        if re.fullmatch(r"--?[a-z][\w-]*", flag) and flag not in known:
            found.append(f"{words[0]} {flag}")
    return found


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def missing(text: str) -> list[str]:
    """Files and folders that are named, and are not there."""
    return [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


def names_of(source: str) -> Iterator[str]:
    """The functions of a module, its classes with their methods and annotated fields, and its constants."""
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name):
                yield name
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


def elsewhere(text: str) -> list[str]:
    """Classes and functions that a table names behind a file, and that the file does not have."""
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    found = {file: {*names_of((ROOT / file).read_text("utf-8"))} for file, _ in named}
    return [
        f"{file}: {name}" for file, row in named for name in re.findall(r"`([\w.]+)`", row) if name not in found[file]
    ]


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
    assert not elsewhere(text)


def test_cells_of_the_architecture_are_short() -> None:
    lines = (ROOT / "docs/architecture.md").read_text("utf-8").splitlines()
    cells = [cell.strip() for line in lines if line.startswith("| ") for cell in line.strip("|").split(" | ")]
    assert len(cells) > 100
    assert [cell for cell in cells if len(cell) > CELL_MAX] == []


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


@pytest.mark.parametrize("path", [path for path in pages() if "archive/" not in path])
def test_a_page_reads_alike_in_the_repository_and_in_the_site(path: str) -> None:
    assert not interrupted((ROOT / path).read_text("utf-8"))


@pytest.mark.parametrize("path", [path for path in pages() if "archive/" not in path])
def test_commands_have_flags_that_there_are(path: str) -> None:
    lines = lines_of_commands((ROOT / path).read_text("utf-8"))
    assert not [each for words in lines for each in unknown_flags(words)]


def test_each_page_is_in_the_navigation_of_the_site() -> None:
    """mkdocs warns of it too, but `make check` has no mkdocs."""
    listed = set(re.findall(r"\w[\w/.-]*\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    names = {page.removeprefix("docs/") for page in pages() if page.startswith("docs/")}
    assert {name for name in names if not name.startswith("archive/")} == listed - {"index.md", "README.md"}


def test_links_out_of_docs_are_pages_of_the_site() -> None:
    site = script_of_docs("site_pages")
    page = "[a](modes.md#gossip) [b](../examples/cnn.py) [c](../examples) [d](https://example.org) ![e](wan.png)"
    wanted = "[a](modes.md#gossip) [b](repository/examples/cnn.py.md) c [d](https://example.org) ![e](wan.png)"
    assert site.rewritten("docs/data.md", page) == wanted
    assert site.rewritten("README.md", "[a](docs/modes.md) [b](LICENSE)") == "[a](modes.md) [b](repository/LICENSE.md)"
    assert site.rewritten("docs/design/gain.md", "[a](../../README.md)") == "[a](../index.md)"
    assert all((ROOT / path).is_file() for path in site.outside())


def test_the_table_of_a_workers_memory_is_that_of_the_account() -> None:
    table = script_of_docs("memory_table").TABLE
    page = (ROOT / "docs/modes.md").read_text("utf-8")
    assert table.rewritten(page) == page, "python docs/memory_table.py"


def test_each_capability_is_refused_with_a_sentence_or_has_a_test_that_runs_it() -> None:
    table = script_of_docs("capabilities")
    page = (ROOT / "docs/modes.md").read_text("utf-8")
    assert table.TABLE.rewritten(page) == page, "python docs/capabilities.py"
    yes = 0
    for row in table.ROWS:
        for mode in table.MODES:
            if table.conflict(row, mode):
                continue
            if said := table.refusal(row, mode):
                assert len(said) > 40 and mode not in row.tests, (row.name, mode)
                continue
            file, _, name = row.tests.get(mode, row.tests.get("", "")).partition(": ")
            assert file and f"def {name}(" in (ROOT / file).read_text("utf-8"), (row.name, mode, name)
            yes += 1
    assert yes > 80


def test_each_other_kind_of_run_is_refused_with_a_sentence_or_has_a_test_that_runs_it() -> None:
    table = script_of_docs("capabilities")
    page = (ROOT / "docs/modes.md").read_text("utf-8")
    assert table.OF_KINDS.rewritten(page) == page, "python docs/capabilities.py"
    yes = 0
    for row in table.KIND_ROWS:
        for name, kind in table.KINDS.items():
            if said := row.check(kind):
                assert len(said) > 40 and name not in row.tests, (row.name, name)
                continue
            file, _, test = row.tests[name].partition(": ")
            assert f"def {test}(" in (ROOT / file).read_text("utf-8"), (row.name, name, test)
            yes += 1
    assert yes > 8


def test_a_stale_table_is_named_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- rows: begin -->\nold\n<!-- rows: end -->\nbelow\n", "utf-8")
    table = script_of_docs("marked_tables").MarkedTable("rows", page, lambda: "new")
    assert table.main(["--check"]) == 1 and "docs/page.md: the table of rows is stale" in capsys.readouterr().out
    assert table.main([]) == 0 and table.main(["--check"]) == 0
    assert page.read_text("utf-8") == "above\n<!-- rows: begin -->\nnew\n<!-- rows: end -->\nbelow\n"
    with pytest.raises(ValueError, match="has to have <!-- rows: begin -->"):
        table.rewritten("no marker")


def test_what_is_not_there_is_found() -> None:
    assert interrupted("text\n- item\n- item\n\n- item\n  text\n- item\n| a |\n") == ["- item", "| a |"]
    assert lines_of_commands(
        "    ps-serve --shards 2 \\\n        --sync bsp > run  # one\n\n    make && ps-top --once\n"
    ) == [
        ["ps-serve", "--shards", "2", "--sync", "bsp"],
        ["ps-top", "--once"],
    ]
    assert unknown_flags(["ps-worker", "-n", "2", "--sink", "bsp", "SCRIPT.py", "--rows", "3"]) == ["ps-worker --sink"]
    names = {*names_of("A: int = 1\nB = 2\nclass C:\n    field: int\n    def method(self): ...")}
    assert names == {"A", "B", "C", "C.field", "C.method"}
    assert elsewhere("`tests/test_docs.py`: `elsewhere`, `nowhere`; `docs/sizes.py`") == ["tests/test_docs.py: nowhere"]
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
