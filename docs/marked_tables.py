"""A table of a page that a script makes. It stands between two markers; `--check` says whether the page is stale.

The page has `<!-- NAME: begin -->` before the table and `<!-- NAME: end -->` after it, once each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class MarkedTable(NamedTuple):
    """A table between two markers of a page.

    Attributes:
        name: the name in the markers.
        page: the file that has the markers.
        make: makes the lines between the markers.
        script: the file of docs/ that makes the table, without ".py"; "": it has the name of the table.
    """

    name: str
    page: Path
    make: Callable[[], str]
    script: str = ""

    def rewritten(self, text: str) -> str:
        """Return the text of the page with a new table. Raises ValueError if a marker is not there exactly once."""
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{self.page.name} has to have {begin} and {end}, once each")
        head, rest = text.split(begin)
        return f"{head}{begin}\n{self.make()}\n{end}{rest.split(end)[1]}"

    def main(self, arguments: list[str]) -> int:
        """Rewrite the page; with --check print a sentence if it is stale. Return the exit code: 1 if it is stale, else 0."""
        old = self.page.read_text("utf-8")
        new = self.rewritten(old)
        if arguments != ["--check"]:
            self.page.write_text(new, "utf-8")
            return 0
        if new != old:
            print(
                f"docs/{self.page.name}: the table of {self.name} is stale; run `python docs/{self.script or self.name}.py`"
            )
        return int(new != old)
