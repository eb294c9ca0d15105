"""Finds the GPUs that people name on a command line, in the table of formats/hardware.py."""

import re

from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import PROCESSORS, Processor, match_processor

_NO_MODEL = {"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "gpu", "gb", "gib", "one", "die"}


def find_processor(text: str) -> Processor:
    """The GPU that people call by this name: "H200", "a100-40", "4090", "H100 PCIe", or PyTorch's name for it.

    A name that several boards bear stands for the commonest of them, which the row's name says.
    Raises UserError, with all names, for one whose memory the table does not hold.
    """
    known = [one for one in PROCESSORS if one.memory_gib]
    wanted = _split_name(text)
    found = _find_by_words(wanted, known) or match_processor(text) or _find_by_beginning(wanted, known)
    if found is None or found not in known:
        # without what a shell would not take
        names = [one.name.partition(" (")[0] for one in known]
        raise UserError(f"GPU '{text}': not in the table; take one of {', '.join(names)}.")
    return found


def _find_by_words(wanted: list[str], known: list[Processor]) -> Processor | None:
    """The first one that has all words, and the model's name among them first; one without other words comes before."""
    fitting = []
    for one in known:
        words = _split_name(one.name)
        if wanted[:1] != words[:1] or not {*wanted} <= {*words}:
            continue
        if {*wanted} == {*words}:
            return one
        fitting.append(one)
    return fitting[0] if fitting else None


MIN_BEGINNING = 3  # letters and digits of "MI300", "H10"


def _find_by_beginning(wanted: list[str], known: list[Processor]) -> Processor | None:
    """Find the first GPU whose model begins so, MI300X for 'MI300', if a digit tells it from a family."""
    first = next(iter(wanted), "")
    if len(first) < MIN_BEGINNING or not re.search(r"\d", first):
        return None
    others = {*wanted[1:]}
    for one in known:
        words = _split_name(one.name)
        if words and words[0].startswith(first) and others <= {*words}:
            return one
    return None


MAX_WORDS_OF_NAME = 5  # "NVIDIA A100 SXM 80 GB"


def count_words_of_name(words: list[str]) -> int:
    """How many of the first words are the name of one GPU, as in H100 SXM 80 GB without quotes; 0 for none."""
    for number in range(min(MAX_WORDS_OF_NAME, len(words)), 0, -1):
        text = " ".join(words[:number])
        # a longer name must be all of it: H200 T4 are two
        if number > 1 and all({*_split_name(text)} != {*_split_name(one.name)} for one in PROCESSORS):
            continue
        try:
            find_processor(text)
        except UserError:
            continue
        return number
    return 0


def find_processors(words: list[str]) -> list[Processor]:
    """The GPUs that the words name, each in one word or several. UserError for one that the table lacks."""
    found: list[Processor] = []
    at = 0
    while at < len(words):
        number = max(1, count_words_of_name(words[at:]))
        found.append(find_processor(" ".join(words[at : at + number])))
        at += number
    return found


def _split_name(name: str) -> list[str]:
    """Split a name into the words that tell boards apart: 'NVIDIA A100-SXM4-80GB' into ['a100', 'sxm', '80']."""
    words = []
    for word in re.findall(r"[a-z0-9]+", name.lower()):
        word = re.sub(r"^sxm\d$", "sxm", word)
        word = re.sub(r"^(\d+)gi?b$", r"\1", word)
        word = re.sub(r"^rtx(?=\d)", "", word)
        if word not in _NO_MODEL:
            words.append(word)
    return words
