"""A last look through a bundle's files for what this process knows to be secret; the rules above should leave none."""

import gzip
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_lite.analysis.trace.file_blocks import GZIP_MAGIC
from megatron_lite.bundle.known_words import is_known
from megatron_lite.bundle.names import KEY_WORDS

_BLOCK_BYTES = 1 << 20
# of a value; shorter ones stand in many texts by chance
MIN_KEY_LETTERS = 8
MAX_KEY_LETTERS = 4096
# anywhere in a variable's name: SLACK_TOKENS, KEY_2
_KEYS = re.compile(KEY_WORDS, re.IGNORECASE)


def list_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The keys in the environment, and where the user's files lie: what it is, by its text."""
    found = {}
    for name, value in environment.items():
        is_long = MIN_KEY_LETTERS <= len(value) <= MAX_KEY_LETTERS
        is_word = value.isalpha() and is_known(value)
        if _KEYS.search(name) and is_long and not is_word:
            found[value] = f"the value of {name}"
    home = environment.get("HOME", "")
    if len(home) >= MIN_KEY_LETTERS:
        found[home] = "the home folder"
    return found


def find_secrets_left(folder: Path, secrets: Mapping[str, str]) -> Iterator[str]:
    """Name each file of a folder that holds a secret, and what that is.

    Args:
        folder: Holds files; gzipped ones are looked into.
        secrets: What each secret is, by its text.
    """
    if not secrets:
        return
    texts = sorted(map(re.escape, secrets), key=len, reverse=True)
    pattern = re.compile("|".join(texts).encode("utf-8", "surrogateescape"))
    overlap = max(map(len, secrets)) * 4
    for path in sorted(folder.iterdir()):
        for block in _read_blocks(path, overlap):
            found = pattern.search(block)
            if found:
                yield f"{path.name}: {secrets[found[0].decode('utf-8', 'surrogateescape')]}"
                break


def _read_blocks(path: Path, overlap: int) -> Iterator[bytes]:
    """The content of a file, unzipped, in blocks of which each begins with the end of the one before."""
    with path.open("rb") as raw:
        is_zipped = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        file = gzip.open(raw) if is_zipped else raw
        before = b""
        while block := file.read(_BLOCK_BYTES):
            yield before + block
            before = block[-overlap:]
