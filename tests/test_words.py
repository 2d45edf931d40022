"""Code, messages and docs are written in plain American English: words that must not come back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ODD = {
    r"\banew\b": "again, restart",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bsittings?\b": "sessions, days",
    r"\bdear(er|ly)?\b": "expensive",
    r"(?<!there )\bis no (?!longer|more|less|better|worse|different)": "is not a",
    r"\bso[- ]many\b": "the number",
    r"\bnot to be had\b": "unavailable",
    r"\bone's own\b": "your",
    r"\bfor want of\b": "because there is no, without",
    r"\bbut for\b": "except for",
    r"\b(go|goes|went) on\b": "continue, resume",
    r"\b(not|is|was) shown to\b": "significant, no significant difference",
    r"\bto the letter\b": "literally",
    r"\bto the bit\b|\bbit-identical\b": "bitwise identical",
    r"\b(make|makes|made) (it|them|these|those|that)? ?again\b": "recompute, rebuild",
    r"\b(told|tell|tells|telling) (\w+ )?apart\b": "distinguish",
    r"\bshared? out\b": "split, divided",
    r"\b(let|lets) go of\b": "release",
    r"\b(bytes|MB|GB|numbers?|images|products|pictures|additions) an? (step|image|module|second|batch|pass)\b": "per",
    r"\bwhere(from|of|by|to)\b|\bthere(of|by|in|to)\b|\bhereby\b": "from which, so, in it",
    r"\brather an? (error|exception) than\b": "fail instead of",
    r"\bhand(s|ed|ing)? on\b": "pass on",
    r"\bdifference told\b|\bis told (so|the nearest)\b": "quoted, reported",
    r"\bwhatever it may\b|\bas it were\b|\bby and by\b": "(leave out)",
}
BRITISH = (
    r"\b\w*(normalis|initialis|optimis(?!t)|summaris|recognis|organis|serialis|penalis|randomis|regularis|quantis"
    r"|minimis|maximis|generalis|specialis|synchronis|visualis|parametris|behaviour|colour|favour|neighbour|honour"
    r"|centre(?!d)|(?<!=)centred|artefact|catalogue|labelled|modelling|travell|grey\b)\w*"
)
BANNED = {**{re.compile(words, re.IGNORECASE): better for words, better in ODD.items()}}
BANNED[re.compile(BRITISH, re.IGNORECASE)] = "American spelling"


def ours() -> list[Path]:
    """Files with words of ours that a user or a contributor reads."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kinds = {".py", ".md", ".toml", ".js", ".css", ".html", ".yml", ".yaml", ".ipynb"}
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    others = {"Makefile", "run", "CITATION.cff"}
    not_ours = {ROOT / "research" / "evidence", ROOT / "tests" / "report" / "golden"}
    return [
        path
        for path in paths
        if (path.suffix in kinds or path.name in others)
        and path.is_file()
        and path != Path(__file__)
        and not not_ours & {*path.parents}
    ]


def odd_words(text: str) -> list[str]:
    """Each odd phrase with what to write instead."""
    lines = " ".join(text.replace("_", " ").split())  # in names, too; a phrase may be broken over two lines
    return [f"{found[0]!r} -> {better}" for words, better in BANNED.items() for found in words.finditer(lines)]


@pytest.mark.parametrize("path", ours(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_plain(path):
    assert odd_words(path.read_text()) == []


def test_docstrings_do_not_begin_with_what():
    """`What a row is called` hides the subject; write `The name of a row`."""
    sources = [path for path in ours() if path.is_relative_to(ROOT / "src") and path.suffix == ".py"]
    assert len(sources) > 200
    assert [path for path in sources if re.search(r'"""What ', path.read_text())] == []


def test_odd_words_are_found():
    assert odd_words("mend that\nand begin anew; this is\nno recipe") != []
    assert len(odd_words("there is no file; it is no longer read")) == 0
