"""docs/llms.txt, the list of the documentation's pages for programs (https://llmstxt.org): `python tests/llms_text.py` writes it anew.

It is made from what people see: the navigation and the table of docs/index.md, and the first lines of each page.
"""

import re
from dataclasses import dataclass

from support.paths import DOCS, REPO

FILE = DOCS / "llms.txt"
SKILL = "skills/megatron-lite/SKILL.md"
OPTIONAL = "The project"  # the caption of the pages that are left out where there is little room
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
INCLUDE = re.compile(r"```\{include\} (\S+)")
MAX_NOTE = 200  # characters


@dataclass(frozen=True)
class Section:
    """A part of the navigation."""

    caption: str
    pages: tuple[str, ...]


def read_navigation() -> list[Section]:
    """The pages of the site, in its order."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    sections = []
    for caption, names in re.findall(r"```\{toctree\}\n:hidden:\n:caption: (.+?)\n\n(.+?)\n```", index, re.DOTALL):
        sections.append(Section(caption, tuple(names.split())))
    return sections


def read_purposes() -> dict[str, str]:
    """What the table of docs/index.md says each page is for, by page."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    purposes: dict[str, str] = {}
    for purpose, links in re.findall(r"^\| (.+?) \| (\[.+) \|$", index, re.MULTILINE):
        for page in re.findall(r"\]\((\S+?)\.md\)", links):
            purposes.setdefault(page, purpose)
    return purposes


def read_page(page: str) -> str:
    """The Markdown of a page, or of the file that it shows."""
    path = DOCS / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    shown = INCLUDE.match(text)
    if shown:
        return (path.parent / shown[1]).read_text(encoding="utf-8")
    return FRONT_MATTER.sub("", text)


def describe_page(page: str, purposes: dict[str, str]) -> str:
    """A line of the list: title, address, and what it is for, or its first sentence where no table says that."""
    title, _, rest = read_page(page).partition("\n")
    first = rest.strip().partition("\n\n")[0]
    sentence = re.split(r"(?<=[.:])\s", " ".join(re.sub(r"\]\([^)]*\)|[\[`*]", "", first).split()))[0].rstrip(":.")
    is_prose = first[:1].isupper() or first.startswith("`megatron-lite")
    note = purposes.get(page) or (sentence[:MAX_NOTE] if is_prose else "")
    return f"- [{title.lstrip('# ')}]({page}.md){f': {note}' if note else ''}"


def write_list() -> str:
    """The whole text."""
    readme = (DOCS / "index.md").read_text(encoding="utf-8")
    title, summary = readme.split("\n\n")[:2]
    lines = [title, "", f"> {' '.join(summary.split())}", ""]
    purposes = read_purposes()
    for section in read_navigation():
        lines += [f"## {'Optional' if section.caption == OPTIONAL else section.caption}", ""]
        lines += [describe_page(page, purposes) for page in section.pages]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(write_list(), encoding="utf-8")
    print(f"written: {FILE.relative_to(REPO)}")
