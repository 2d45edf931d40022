"""Hooks of `mkdocs build`: pages from outside docs/, generated reference pages, and links that work on the site.

Links in the Markdown files are relative paths in the repository, so they work in a repository browser. Here they become
links between pages; a link to a file that is not a page becomes its name.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

import cli_reference
import notebooks
from mkdocs.structure.files import File, Files

from maskconnect.recipes import reference

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}  # and their names on the site
GENERATED = {"reference/command-line.md": cli_reference.markdown, "reference/recipes.md": reference.markdown}
GENERATED |= {f"notebooks/{path.stem}.md": partial(notebooks.markdown, path) for path in notebooks.NOTEBOOKS}
CELLS = {"short": 24, "some": 59}
"""The most characters of a table cell of each class; longer ones are `words`. Short ones stay on one line."""
CODE_OR_LINK = re.compile(r"(?ms)^ *```.*?^ *```|(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)|`[^`]*`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    research = [*(ROOT / "research").glob("*.md"), *(ROOT / "research/images").glob("*")]
    found = {path.relative_to(ROOT).as_posix(): path for path in sorted(research)}
    found |= {page: ROOT / name for name, page in OUTSIDE.items() if (ROOT / name).exists()}
    for page, path in found.items():
        files.append(File.generated(config, page, abs_src_path=str(path)))
    for page, markdown in GENERATED.items():
        files.append(File.generated(config, page, content=markdown()))
    return files


def on_post_build(config: Any) -> None:
    """Remove the page for missing addresses: it finds its styles only if the site is at the root of its host."""
    (Path(config.site_dir) / "404.html").unlink(missing_ok=True)


def on_page_content(content: str, **_: Any) -> str:
    """Mark the length of table cells, and code that is a flag, for `site.css`; let dotted names break after a dot.

    Pictures link to themselves, so that a tap on a phone shows them in full size.
    """
    content = re.sub(r"(?s)<td>(.*?)</td>", _cell, content)
    content = re.sub(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>', r'<p><a href="\2">\1</a></p>', content)
    content = re.sub(r"<code>(?=--?\w[^<]{,26}</code>)", "<code class=flag>", content)
    return re.sub(r"(doc-object-name [^>]+>)([\w.]+)", lambda name: name[1] + name[2].replace(".", ".<wbr>"), content)


def _cell(cell: re.Match[str]) -> str:
    length = len(re.sub(r"<[^>]+>", "", cell[1]))
    kind = next((kind for kind, most in CELLS.items() if length <= most), "words")
    return f"<td class={kind}>{cell[1]}</td>"


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrite the links of a page."""
    at = page.file.src_uri
    inside = at if at.startswith("research/") else f"docs/{at}"
    here = next((name for name, uri in OUTSIDE.items() if uri == at), inside)

    def rewritten(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        if link is None or re.match(r"[a-z]+:|#", link):
            return match[0]
        name, mark, part = link.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        uri = OUTSIDE.get(place, place.removeprefix("docs/")).replace(".ipynb", ".md")
        if files.get_file_from_path(uri):
            text = _title(ROOT / place) if text.endswith(".md") else text
            return f"{image}[{text}]({posixpath.relpath(uri, posixpath.dirname(at) or '.')}{mark}{part})"
        if not (ROOT / place).exists():
            return match[0]  # `mkdocs build --strict` names it
        return f"{text} (`{place}`)" if " " in text else f"`{text.strip('`')}`"

    return CODE_OR_LINK.sub(rewritten, markdown)


def _title(page: Path) -> str:
    """Return the title of a page: its first heading."""
    return next(line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("# "))
