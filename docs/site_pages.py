"""Puts what README.md and the pages link to outside docs/ into the site: mkdocs runs these hooks (mkdocs.yml).

One rule for each relative link, so that the same link works in the repository and in the site:

1. README.md is the site's first page.
2. A file of docs/ is its page.
3. Any other file is a page under repository/, added because a page links to it: Markdown as it is, all else as a code block.
4. A folder has no page. The link becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```[^\n]*$)", re.M | re.S)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".json": "json"}


def site_path(path: str) -> str:
    """Return the path in the site's sources of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path if path.endswith('.md') else f'{path}.md'}"


def target(path: str, link: str) -> tuple[str, str] | None:
    """Return (path in the repository, anchor with #) of a link of the file `path`; None for a link to a host or an anchor."""
    if "://" in link or link.startswith(("mailto:", "#")):
        return None
    file, mark, anchor = link.partition("#")
    return normpath(f"{dirname(path)}/{file}".lstrip("/")), mark + anchor


def linked(path: str, page: str) -> set[str]:
    """Return the files outside docs/ that a page links to, as paths in the repository."""
    found = {target(path, link) for part in CODE.split(page)[::2] for _, _, link in LINK.findall(part)}
    return {each[0] for each in found if each and not each[0].startswith("docs/") and (ROOT / each[0]).is_file()}


def outside() -> dict[str, str]:
    """Return the sources of all pages that are not in docs/, by path in the repository."""
    texts: dict[str, str] = {}
    waiting = {"README.md"}.union(
        *(linked(page.relative_to(ROOT).as_posix(), page.read_text("utf-8")) for page in (ROOT / "docs").rglob("*.md"))
    )
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text("utf-8")
        if path.endswith(".md"):
            waiting |= linked(path, text) - texts.keys()
        else:
            text = f"# {path}\n\n~~~ {LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n~~~\n"
        texts[path] = text
    return texts


def rewritten(path: str, page: str) -> str:
    """Return a page of the repository with its links as the site has them."""
    here = dirname(site_path(path))

    def moved(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        found = target(path, link)
        if found is None:
            return match[0]
        if (ROOT / found[0]).is_dir():
            return text
        return f"{image}[{text}]({quote(relpath(site_path(found[0]), here or '.'))}{found[1]})"

    return "".join(part if at % 2 else LINK.sub(moved, part) for at, part in enumerate(CODE.split(page)))


def slug(heading: str, separator: str = "-") -> str:
    """Return the name under which a heading is linked to, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in outside().items():
        files.append(File.generated(config, site_path(path), content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    site = page.file.src_uri
    of_site = {site_path(path): path for path in outside()}
    path = of_site.get(site, f"docs/{site}")
    return rewritten(path, markdown) if path.endswith(".md") else markdown
