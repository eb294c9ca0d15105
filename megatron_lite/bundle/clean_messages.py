"""Cleans what exceptions, logs and statuses say: sentences of known form stay, anything else may be a text of data."""

import re

from megatron_lite.bundle.names import Names

# of this package, by which a status of run.json begins
_STATUS = re.compile(r"running, or killed|running|finished|interrupted|killed or lost: its process is gone")
_ERROR = re.compile(r"(?P<before>(?:failed: )?)(?P<error>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))\b(?::|$)")


def clean_message(names: Names, text: str) -> str:
    """A message, of which known sentences and the class of an exception stay."""
    if _STATUS.fullmatch(text):
        return text
    error = _ERROR.match(text)
    if error is None:
        return names.clean_text(text)
    rest = text[error.end() :].strip()
    said = f"{error['before']}{names.clean_name(error['error'])}"
    return f"{said}: {names.clean_text(rest)}" if rest else said
