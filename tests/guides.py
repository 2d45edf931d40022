"""The code of the guides: the ```python blocks of a page, and the comment before a block that says where it runs.

`<!-- not run: why -->` blocks never run; `<!-- integrations -->` blocks need other libraries.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"
PAGES = [README, DOCS / "getting-started.md", DOCS / "choosing.md", *sorted((DOCS / "guides").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^print\(.*\) +# (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A piece of code in a page."""

    code: str
    note: str  # the comment before it, or nothing

    @property
    def runs(self):
        return not self.note.startswith("not run: ")

    @property
    def needs_libraries(self):
        return self.note == "integrations"


def blocks_of(page):
    found = [Block(match[2], match[1] or "") for match in BLOCK.finditer(page.read_text())]
    for block in found:
        assert not block.note or not block.runs or block.needs_libraries, f"unknown comment: {block.note}"
    return found


def run(blocks):
    """Run blocks one after the other; what a line prints is what its comment says."""
    names = {"__name__": "guide"}
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block.code, "guide", "exec"), names)
        printed = output.getvalue().splitlines()
        for said in PRINTED.findall(block.code):
            assert not re.match(r"[\[\d]|\w+\(", said) or said in printed, said
