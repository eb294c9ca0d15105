"""The documentation as a site, and the README: what they link to is there, and pages need no network."""

import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.package_files import MODULES, reach_modules, read_core_files
from support.paths import REPO

from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.cli.main import main
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags, read_flags

MAX_README_WORDS = 900
ABOUT = 0.05  # figures of the README may be off by so much
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
LOADING = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADING_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest"}


class Page(HTMLParser):
    """What a page of the site can be linked to by, links to, and loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and LOADING_LINKS & set((given.get("rel") or "").split()):
            self.loaded.append(given["href"])
        if given.get(LOADING.get(tag)):
            self.loaded.append(given[LOADING[tag]])


def find_outside_loads(text: str) -> list[str]:
    """Addresses of other machines that a style sheet or style attribute loads."""
    return re.findall(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")]+)", text)


def read_prose(page: Path) -> str:
    """A Markdown page without its blocks of code."""
    return re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_links_and_pictures_of_pages_are_files_of_the_repository():
    missing = []
    for page in PAGES:
        targets = [urlsplit(target) for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(page))]
        missing += [(page.name, to.path) for to in targets if not to.scheme and not (page.parent / to.path).exists()]
    assert missing == []


def test_the_readme_is_short_and_what_it_says_of_the_core_is_so():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < MAX_README_WORDS
    assert len(re.findall(r"!\[[^\]]+\]\(docs/pictures/", text)) == 3
    said = re.search(r"(\d+) files, ([\d,]+) lines. They stand on (?:about )?(\d+) more", text)
    files = read_core_files()
    own = {module for module, path in MODULES.items() if path in files}
    reached, _ = reach_modules(own)
    below = {module for module in reached - own if MODULES[module].read_text(encoding="utf-8").strip()}
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert int(said[1]) == len(files)
    assert int(said[2].replace(",", "")) == pytest.approx(lines, rel=ABOUT)
    assert int(said[3]) == pytest.approx(len(below), rel=ABOUT)


def test_files_that_the_decision_on_size_counts_are_there():
    """Its tables name modules by their path in the package, without .py."""
    text = (REPO / "docs" / "decisions" / "040-size.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if re.match(r"\| .+ \| [\d,]+ \| `", line)]
    names = [name for line in tables for name in re.findall(r"`([\w/]+)`", line)]
    assert len(names) > 50
    assert [name for name in names if f"megatron_lite.{name.replace('/', '.')}" not in MODULES] == []


def test_the_walks_lead_through_rooms_that_are_there():
    """Each `file.py:name` is a file of the package with a function or class of that name."""
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"`([\w/]+\.py):(\w+)`", page)
    assert len(rooms) > 30
    for path, name in rooms:
        text = (REPO / "megatron_lite" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE), (path, name)


def test_what_the_page_of_plan_shows_is_what_plan_prints(capsys, monkeypatch):
    """Of the commands that stand there whole; lines between those shown are left out as "..."."""
    monkeypatch.chdir(REPO)
    page = (REPO / "docs" / "planning.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```\n\$ megatron-lite (plan .*?[^\\])\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    whole = [(command.replace("\\\n", " "), lines) for command, lines in examples if "..." not in command]
    assert len(whole) == 4
    for command, lines in whole:
        assert main(shlex.split(command)) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        for line in lines.splitlines():
            assert line == "..." or line in printed, line


def test_what_a_page_loads_and_links_to_is_seen():
    made = "<link rel=stylesheet href=a.css><link rel=next href=b.html><img src=//c/d.png><p id=e><a href=f.html#g>"
    page = Page.__new__(Page)
    HTMLParser.__init__(page)
    page.ids, page.links, page.loaded = set(), [], []
    page.feed(made)
    assert (page.ids, page.links, page.loaded) == ({"e"}, ["f.html#g"], ["a.css", "//c/d.png"])
    style = "@import 'https://a/b.css'; p { background: url( \"//c/d.png\") } q { background: url(e.png) }"
    assert find_outside_loads(style) == ["https://a/b.css", "//c/d.png"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The site, built with every warning an error."""
    pytest.importorskip("furo", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", folder / "state", "docs", folder / "html"],
        cwd=REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_link_within_the_site_leads_somewhere_and_no_page_loads_from_the_network(built):
    pages = {path: Page(path) for path in built.rglob("*.html")}
    assert len(pages) > 40
    dead, foreign = [], []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                foreign += [f"{path.name} loads {link}"] if link in page.loaded and parts.scheme != "data" else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.exists() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            )
            dead += [] if there else [f"{path.relative_to(built)} -> {link}"]
        foreign += find_outside_loads(path.read_text(encoding="utf-8"))
    foreign += [one for path in built.rglob("*.css") for one in find_outside_loads(path.read_text(encoding="utf-8"))]
    assert (dead, foreign) == ([], [])


@pytest.mark.slow
def test_the_site_has_texts_for_programs(built):
    listed = (built / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\((\S+)\)", listed)
    assert len(links) > 25
    assert [link for link in links if not (built / link).is_file()] == []
    whole = (built / "llms-full.txt").read_text(encoding="utf-8")
    assert all(code in whole for code in RULES)


@pytest.mark.slow
def test_the_catalogs_have_every_finding_flag_and_key(built):
    assert set(RULES) <= Page(built / "findings.html").ids
    spellings = {spelling for flag in list_flags(Args) for spelling in flag.spellings} | set(read_flags())
    terms = "".join(re.findall(r"<dt>.*?</dt>", (built / "flags.html").read_text(encoding="utf-8"), re.DOTALL))
    shown = re.findall(r'<span class="pre">(--[^<]+)</span></code>', terms)
    assert sorted(shown) == sorted(spellings)
    schema = json.loads((REPO / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    keys = {key for one in [schema, *schema["$defs"].values()] for key in one["properties"]}
    text = (built / "report_json.html").read_text(encoding="utf-8")
    assert keys <= set(re.findall(r'<li><p><code[^>]*><span class="pre">(\w+)</span>', text))
    text = (built / "findings.html").read_text(encoding="utf-8")
    assert all(
        text.count(f"<dt>{part}") == len(RULES)
        for part in ("Meaning", "Measured", "Cost", "Do", "Flags", "False alarm")
    )
