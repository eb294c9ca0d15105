"""Settings of the documentation site, and the catalogs that it makes from the code.

    pip install -e '.[docs]' && python -m sphinx -W --keep-going -b html docs build/site

The pages are Markdown files that GitHub shows too. findings.md, flags.md and report_json.md hold a marked line each, which a build replaces
by the rules of megatron_lite/analysis/findings, the flags of megatron_lite/config and the keys of report.schema.json.
"""

import json
import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.analysis.findings.rules import MODULES, Rule, get_page
from megatron_lite.config.args import Args
from megatron_lite.config.flags import ANSWERS, RESPELLED, Flag, list_flags, read_flags
from megatron_lite.config.help import describe_default, describe_value
from megatron_lite.terminal import describe_version

project = "megatron_lite"
release = describe_version().split()[1]
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # "--lr" keeps both dashes
html_theme = "furo"
html_title = "megatron_lite"
html_show_copyright = html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "tango", "monokai"
highlight_language = "none"

ANSWER_TITLES = {
    "accepted": "Accepted, without an effect here",
    "retired": "Retired by Megatron-LM",
    "renamed": "Renamed by Megatron-LM",
    "respelled": "Old spellings",
    "refused": "Refused",
    "absent": "Not here",
}
ANSWER_TEXTS = {
    "accepted": "The run starts, and one line says why the flag changes nothing.",
    "retired": "Megatron-LM takes them no more. The run stops and says to drop them; `megatron-lite plan` reads them.",
    "renamed": "Megatron-LM takes the old name no more. The run stops and gives the new one; `megatron-lite plan` reads them.",
    "respelled": "The trainer reads them as the flag that stands behind.",
    "refused": "The run stops before anything is made, with the reason and what to do.",
    "absent": "Less usual flags. The run stops and names the flag.",
}


def escape(text: str) -> str:
    """Plain text as Markdown, in which flags and commands are set as code and lead to the catalog."""
    known = {spelling for flag in list_flags(Args) for spelling in flag.spellings}
    pieces = re.split(r"(--[a-z][a-z0-9-]*[a-z0-9]|megatron-lite [a-z-]+[a-z])", text)
    for at, piece in enumerate(pieces):
        if at % 2 == 0:
            pieces[at] = re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", piece)
        else:
            pieces[at] = f"[`{piece}`](#{get_anchor(piece)})" if piece in known else f"`{piece}`"
    return "".join(pieces)


def get_anchor(spelling: str) -> str:
    """--num-layers -> flag-num-layers, of letters that Sphinx leaves as they are."""
    return "flag-" + spelling.lstrip("-").lower().replace("_", "-underscore-")


def capitalize(text: str) -> str:
    """With a large first letter."""
    return text[:1].upper() + text[1:]


def list_rules() -> str:
    """Every rule as a section, by subject."""
    lines = []
    for module in MODULES:
        lines += ["", f"## {module.__doc__.strip().rstrip('.')}", ""]
        for rule in vars(module).values():
            if isinstance(rule, Rule) and rule.function.__module__ == module.__name__:
                first, _, rest = get_page(rule.code).partition("\n\n")
                lines += [
                    f"### {rule.code}",
                    "",
                    f"**{capitalize(escape(rule.title))}.** {escape(' '.join(first.split()))}",
                    "",
                ]
                for part in re.sub(r"\n {4}", " ", rest).split("\n"):
                    name, _, text = part.partition(": ")
                    lines += [name, f": {capitalize(escape(text))}", ""]
    return "\n".join(lines)


def define(spellings: Iterable[str], value: str, text: str) -> list[str]:
    """A term that each of its spellings leads to, and what it means."""
    names = list(spellings)
    targets = [f"({get_anchor(name)})=" for name in names]
    return ["", *targets, ", ".join(f"`{name}`" for name in names) + (f" `{value}`" if value else ""), f": {text}"]


def describe_flag(flag: Flag) -> list[str]:
    """A flag with its value, default and range."""
    texts, default = [escape(flag.help)], describe_default(flag)
    if flag.choices:
        texts.append(f"One of {', '.join(f'`{choice}`' for choice in flag.choices)}.")
    if flag.must_be:
        texts.append(f"{capitalize(escape(flag.must_be.describe()))}.")
    if default:
        texts.append(f"Default: `{default}`.")
    return define(flag.spellings, "" if flag.choices else describe_value(flag), " ".join(texts))


def list_all_flags() -> str:
    """The trainer's flags by group, then Megatron-LM's others by answer."""
    lines = []
    for title, flags in groupby(list_flags(Args), key=lambda flag: flag.group):
        lines += ["", f"## {title}"]
        for flag in flags:
            lines += describe_flag(flag)
    for answer in ANSWERS:
        lines += ["", f"## {ANSWER_TITLES[answer]}", "", ANSWER_TEXTS[answer]]
        answered = [flag for flag in read_flags().values() if flag.answer == answer]
        for text, of_one_text in groupby(answered, key=lambda flag: flag.text):
            meaning = f"{'Now ' if answer == RESPELLED else ''}{capitalize(escape(text or 'leave it out'))}."
            lines += define((flag.name for flag in of_one_text), "", meaning)
    return "\n".join(lines)


def name_type(schema: dict) -> str:
    """A JSON schema's type in words, with links to the objects of the page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(name_type, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "anything")
    if isinstance(kinds, list):
        return " or ".join(name_type({**schema, "type": kind}) for kind in kinds)
    if kinds == "array" and isinstance(schema.get("items"), dict):
        return f"list of {name_type(schema['items'])}"
    if kinds == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {name_type(schema['additionalProperties'])}"
    return "list" if kinds == "array" else kinds


def list_report_keys() -> str:
    """The objects of report.schema.json, each key with its type and meaning."""
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    lines = []
    for name, described in {"The whole": schema, **schema["$defs"]}.items():
        lines += [
            "",
            f"## {name}",
            "",
            *([] if described is schema else [escape(described.get("description", ""))]),
            "",
        ]
        for key, value in described.get("properties", {}).items():
            meaning = escape(value.get("description", ""))
            lines.append(f"- `{key}` ({name_type(value)}){f': {meaning}' if meaning else ''}")
    return "\n".join(lines)


OUTSIDE = {  # files that other files show on a page of the site, or a folder's first page
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "../nsight_profile/README.md": "nsight.md",
    "decisions": "decisions/index.md",
}
LINK_IN_LIST = r"^- \[[^\]]+\]\(([\w/-]+)\.md\)"  # of a page, in llms.txt
CATALOGS = {
    "findings": ("<!-- findings -->", list_rules),
    "flags": ("<!-- flags -->", list_all_flags),
    "report_json": ("<!-- keys -->", list_report_keys),
}


def fill_page(docname: str, text: str) -> str:
    """Put a catalog in the place of its mark, and let links stay within the site."""
    if docname in CATALOGS:
        mark, make = CATALOGS[docname]
        before, found, after = text.partition(mark)
        if not found:
            raise ValueError(f"docs/{docname}.md has no line {mark}")
        text = before + make() + after
    for outside, page in OUTSIDE.items():
        text = text.replace(f"]({outside})", f"]({page})")
    return text


def prepare_page(app, docname: str, source: list[str]):
    """Change the text of a page before it is read."""
    source[0] = fill_page(docname, source[0])


def write_texts_for_programs(app, failure):
    """Write llms.txt with links to the pages of the site, and llms-full.txt with the pages for users themselves."""
    if failure or app.builder.format != "html":
        return
    listed = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    for_users, _, _ = listed.partition("## Optional")
    texts = []
    for page in re.findall(LINK_IN_LIST, for_users, re.MULTILINE):
        texts.append(fill_page(page, (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")))
    out = Path(app.outdir)
    skill = "skills/megatron-lite/SKILL.md"
    (out / skill).parent.mkdir(parents=True, exist_ok=True)
    (out / skill).write_bytes((ROOT / "docs" / skill).read_bytes())
    on_the_site = re.sub(LINK_IN_LIST, lambda found: found[0].replace(".md)", ".html)"), listed, flags=re.MULTILINE)
    (out / "llms.txt").write_text(on_the_site, encoding="utf-8")
    (out / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", prepare_page)
    app.connect("build-finished", write_texts_for_programs)
    return {"parallel_read_safe": True}
