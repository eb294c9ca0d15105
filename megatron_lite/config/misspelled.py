"""Answers to a flag that nobody knows: whose it is, or what was most likely meant."""

import difflib
from collections.abc import Sequence

from megatron_lite.config.flags import RESPELLED, STOPPING, find_texts, read_flags, read_launcher_flags

ALMOST = 0.9  # similarity of a typo
MIN_LIKENESS = 0.65  # of words and flags that may have been meant


def describe_unknown(name: str, known: Sequence[str], others: Sequence[str]) -> tuple[str, list[str]]:
    """Describe a flag that nobody knows by what it may have been meant for.

    That is what is spelled almost like it, or up to three knobs that begin with it, or those most like it.

    Args:
        name: The flag as it was typed.
        known: Flags of this trainer.
        others: What may stand among them and is no setting.

    Returns:
        A line, and the flags that were most likely meant.
    """
    wanted = "--" + name.lstrip("-").replace("_", "-").lower()
    answer = read_launcher_flags().get(wanted)
    if answer is not None:
        return f"{name} {answer}.", []
    lacking = find_texts(*STOPPING)
    names = [*known, *others, *read_flags()]
    twins = find_closest(wanted, names, ALMOST)
    if twins and lacking.keys() >= set(twins):
        not_here = f"{' or '.join(twins)} of Megatron-LM is not here either"
        return f"{name} is not a flag, and {not_here}; leave it out.", []
    here = [other for other in names if other not in lacking]
    near = find_closest(wanted, here, ALMOST)
    if not near:
        near = _find_longer_or_alike(wanted, [*known, *find_texts(RESPELLED)])
    if not near:
        return f"{name} is not a flag; --help lists them all.", []
    return f"{name} is not a flag; did you mean {' or '.join(near)}?", near


def _find_longer_or_alike(wanted: str, knobs: Sequence[str]) -> list[str]:
    """Up to three knobs that begin with a word, or else those most like it."""
    if len(wanted) > len("--x"):
        longer = [knob for knob in knobs if knob.startswith(wanted)]
        if longer:
            return longer[:3]
    return [knob for knob in find_closest(wanted, knobs, MIN_LIKENESS) if _share_words(wanted, knob)]


def _share_words(wanted: str, knob: str) -> bool:
    """Whether two words of a flag, or most of them, are in another one.

    They are not in --world-size and --vocab-size, which have 'size' alone.
    """
    words = wanted.strip("-").split("-")
    others = knob.strip("-").split("-")
    found = sum(bool(difflib.get_close_matches(word, others, 1, MIN_LIKENESS)) for word in words)
    return found > 1 or 2 * found > len(words)


def find_closest(word: str, words: Sequence[str], least: float) -> list[str]:
    """Find the most similar words, several if they are equally so.

    Args:
        word: The word that was typed.
        words: Words that may have been meant.
        least: Similarity below which a word does not count, from 0 to 1 (difflib's ratio).
    """
    if word == "--":
        return []
    near = difflib.get_close_matches(word, words, n=3, cutoff=least)
    ratios = {other: difflib.SequenceMatcher(None, other, word).ratio() for other in near}
    best = max(ratios.values(), default=0.0)
    return sorted(other for other in near if ratios[other] == best)
