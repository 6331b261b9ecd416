"""Prints the sizes of the project: `python docs/sizes.py`, and `make check` at its end. tests/test_layout.py has the limits.

A line of code is one that holds a token of Python other than a comment or a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("protocols", "compression", "ps", "worker")
# Read by date or by name, not from the top; docs/results.md is made from data by `python -m bench.report`.
ARCHIVE = ("docs/archive/", "docs/results.md", "docs/decisions.md", "docs/renamed.md")
SMALL = 60  # lines of a file that wants a reason
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def lines_of_code(source: str) -> int:
    """Return the count of lines that hold code."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def rows() -> list[tuple[str, str]]:
    files = [file for package in PRODUCT for file in (ROOT / package).rglob("*.py")]
    sources = [file.read_text("utf-8") for file in files]
    named = [source for file, source in zip(files, sources, strict=True) if file.name != "__init__.py"]
    bench = [file.read_text("utf-8") for file in (ROOT / "bench").rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    words = {page.relative_to(ROOT).as_posix(): len(re.findall(r"\S+", page.read_text("utf-8"))) for page in pages}
    archived = sum(count for page, count in words.items() if page.startswith(ARCHIVE))
    return [
        ("lines of code of the product", f"{sum(map(lines_of_code, sources)):,}"),
        ("its files, without __init__", f"{len(named):,}"),
        (f"of these under {SMALL} lines", f"{sum(source.count(chr(10)) < SMALL for source in named):,}"),
        ("lines of bench", f"{sum(source.count(chr(10)) for source in bench):,}"),
        ("words of docs outside an archive", f"{sum(words.values()) - archived:,}"),
        ("words of the archive", f"{archived:,}"),
    ]


if __name__ == "__main__":
    for name, value in rows():
        print(f"{name:34} {value:>8}")
