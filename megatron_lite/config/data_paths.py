"""The words of --data-path: one prefix, several, or weights and prefixes in turn."""


def weights_and_prefixes(words: tuple[str, ...]) -> tuple[list[float] | None, list[str]]:
    """('0.3', 'a', '0.7', 'b') -> ([0.3, 0.7], ['a', 'b']); otherwise (None, words), as Megatron reads them."""
    if not words or len(words) % 2:
        return None, list(words)
    try:
        weights = [float(word) for word in words[0::2]]
    except ValueError:
        return None, list(words)
    return weights, list(words[1::2])


def prefixes(words: tuple[str, ...]) -> list[str]:
    """Only the prefixes."""
    return weights_and_prefixes(words)[1]
