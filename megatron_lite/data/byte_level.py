"""What GPT-2's byte-level vocabulary files have in common: their alphabet and how text is cut before merging."""

END_OF_TEXT = "<|endoftext|>"

# Contractions, letters, digits, other signs (each with one space before it), white space. A run of white space
# leaves its last character to the word behind it.
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in vocab.json and merges.txt, in the order of GPT-2's first 256 ids.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet
