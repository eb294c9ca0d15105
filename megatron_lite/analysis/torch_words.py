"""Translation of this trainer's flags into PyTorch's words, for reports on jobs that do not take these flags."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("torch_words.tsv")
# flags of a named program are not this trainer's: they stay
_OF_OTHERS = (
    r"\b(?:(?:in|of|for) (?:Megatron-LM|DeepSpeed|vLLM|SGLang)|nsys|nvidia-smi|torchrun|megatron-lite)\b[^;,.)]*"
)
_OF_COMMANDS = r"--(?:against|force|all|json|html|fail-if|steps|memory)(?![\w-])"  # of report, compare, audit and watch
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
_KEPT = re.compile(f"{_OF_OTHERS}|{_OF_COMMANDS}")
_NOTHING = "\0"  # in place of a flag that has no words, until the sentence around it is mended
_REMNANTS = (
    re.compile(r"\0, (?!or |and )"),
    re.compile(r"\s*\(\0\)|, \0|: \0(?=$|[;.)]|, (?:or|and) )|\s?\0"),
)


@dataclass(frozen=True)
class Words:
    """A row of the table."""

    flag: re.Pattern[str]
    torch: str
    watch: str


@functools.cache
def _read_words() -> tuple[Words, ...]:
    lines = [line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(Words(re.compile(rf"{flag}(?![\w-])"), torch, watch) for flag, torch, watch in lines[1:])


@functools.cache
def _find_flags() -> re.Pattern[str]:
    flags = "|".join(f"(?:{one.flag.pattern})" for one in _read_words())
    return re.compile(rf"{_KEPT.pattern}|(?<![\w-])(?:{flags})")


def in_torch_words(text: str, watched: bool = False) -> str:
    """Put PyTorch's words in place of this trainer's flags.

    Flags of another program that the text names stay, and so do flags that the table lacks.

    Args:
        text: what names the flags.
        watched: whether it is about a run under `megatron-lite watch`.
    """

    def replace_flag(found: re.Match[str]) -> str:
        if _KEPT.fullmatch(found[0]):
            return found[0]
        return _translate(found[0], watched) or _NOTHING

    if "--" not in text:
        return text
    said = _find_flags().sub(replace_flag, text)
    for remnant in _REMNANTS:
        said = remnant.sub("", said)
    return said


def _translate(flag: str, watched: bool) -> str:
    """Find PyTorch's words for a flag; the flag itself where the table lacks it."""
    for row in _read_words():
        found = row.flag.fullmatch(flag)
        if found:
            words = row.torch
            if watched and row.watch:
                words = row.watch
            return found.expand(words)
    return flag


def remove_other_programs(text: str) -> str:
    """The text without the parts that name another program and its flags ("in Megatron-LM --tp-comm-overlap")."""
    return _KEPT.sub("", text)


def names_flag(text: str) -> bool:
    """Whether the text names a flag that is no named program's."""
    return _FLAG.search(remove_other_programs(text)) is not None


def list_torch_words(text: str) -> list[tuple[str, str]]:
    """List each flag of this trainer in a text with PyTorch's words, in order; flags without words are left out."""
    found = [one[0] for one in _find_flags().finditer(text) if not _KEPT.fullmatch(one[0])]
    pairs = {flag: _translate(flag, False) for flag in found if flag.startswith("--")}
    return [(flag, words) for flag, words in pairs.items() if words]
