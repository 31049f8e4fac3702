"""Documentation pages: avoided words, links and the length of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(REPOSITORY)) for page in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"))
)
#: From the project's style: say who acts, and use the terms of the field.
AVOIDED = (
    *("what", "tell", "tells", "told", "nobody", "somebody", "anybody", "whoever", "whatever", "whom"),
    *("of ours", "that which", "beside", "besides", "anew", "thereby", "whereof", "runs dry"),
    *("before its time", "of one's own", "as it was before"),
)
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MOST_LINES = 150
#: Words of a sentence; an inline code span counts as one.
_MOST_WORDS = 20


def prose(page: str) -> str:
    """Return a page without code."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]+`", "x", re.sub(r"<!--.*?-->", "", _FENCE.sub("", text)))


def avoided_in(text: str) -> list[str]:
    flat = " ".join(text.split()).lower()
    return [word for word in AVOIDED if re.search(rf"\b{re.escape(word)}\b", flat)]


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and lists; headings and tables have none."""
    lines = ["" if line.startswith(("#", "|", "!")) else line for line in text.splitlines()]
    items = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    links_as_text = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(item.split())) for item in items]
    return [part for item in links_as_text for part in re.split(r"(?<=[.?:;])\**\s+", item) if part]


@pytest.mark.parametrize("page", PAGES)
def test_avoided_words_are_not_on_the_page(page: str) -> None:
    # A heading may be a question.
    assert avoided_in(re.sub(r"^#+ .*$", "", prose(page), flags=re.MULTILINE)) == []


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    assert [one for one in sentences(prose(page)) if len(one.split()) > _MOST_WORDS] == []


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= _MOST_LINES


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    folder = (REPOSITORY / page).parent
    text = _FENCE.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    broken = []
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        path = (folder / target).resolve() if target else REPOSITORY / page
        if re.match(r"\w+:", link):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


def test_the_index_lists_every_page() -> None:
    linked = set(_LINK.findall((REPOSITORY / "docs/index.md").read_text(encoding="utf-8")))
    assert {path.name for path in REPOSITORY.glob("docs/*.md")} - {"index.md"} <= linked
