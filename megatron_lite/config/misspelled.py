"""What to say of a flag that nobody knows: whose it is, or what was most likely meant."""

import difflib
from collections.abc import Sequence

from megatron_lite.config.flags import RESPELLED, STOPPING, find_texts, read_flags, read_launcher_flags

ALMOST = 0.9  # similarity of a typo
ALIKE = 0.65  # of words and flags that may have been meant


def describe_unknown(name: str, known: Sequence[str], others: Sequence[str]) -> tuple[str, list[str]]:
    """(a line on `name`, the flags that were most likely meant).

    It names what is spelled almost like it, or up to three knobs that begin with it, or those most like it.

    Args:
        known: Flags of this trainer.
        others: What may stand among them and is no setting.
    """
    lacking = find_texts(*STOPPING)
    wanted = "--" + name.lstrip("-").replace("_", "-").lower()
    if answer := read_launcher_flags().get(wanted):
        return f"{name} {answer}.", []
    names = [*known, *others, *read_flags()]
    twins = find_closest(wanted, names, ALMOST)
    if twins and lacking.keys() >= set(twins):
        not_here = f"{' or '.join(twins)} of Megatron-LM is not here either"
        return f"{name} is not a flag, and {not_here}; leave it out.", []
    knobs = [*known, *find_texts(RESPELLED)]
    longer = [knob for knob in knobs if knob.startswith(wanted) and len(wanted) > 3]
    almost = find_closest(wanted, [other for other in names if other not in lacking], ALMOST)
    alike = [knob for knob in find_closest(wanted, knobs, ALIKE) if _share_words(wanted, knob)]
    near = almost or longer[:3] or alike
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them all."
    return f"{name} is not a flag; {hint}", near


def _share_words(wanted: str, knob: str) -> bool:
    """Whether two words of a flag, or most of them, are in another one: --world-size and --vocab-size have 'size' alone."""
    words = wanted.strip("-").split("-")
    others = knob.strip("-").split("-")
    found = sum(bool(difflib.get_close_matches(word, others, 1, ALIKE)) for word in words)
    return found > 1 or 2 * found > len(words)


def find_closest(word: str, words: Sequence[str], least: float) -> list[str]:
    """The most similar of `words`, several if they are equally so."""
    near = difflib.get_close_matches(word, words, n=3, cutoff=least) if word != "--" else []
    ratios = [difflib.SequenceMatcher(None, other, word).ratio() for other in near]
    return sorted(other for other, ratio in zip(near, ratios) if ratio == ratios[0])
