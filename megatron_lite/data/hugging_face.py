"""Tokenizers of Hugging Face's transformers."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence

from megatron_lite.data.byte_pairs import mended
from megatron_lite.data.optional_dependency import optional_package
from megatron_lite.errors import UserError

SECONDS_TO_ANSWER = 10


class HuggingFaceTokenizer:
    """A folder that save_pretrained wrote, or a name on the hub; code that a repository brings along is never run.

    eod is its end of sequence, or its separator, or None. A special token's text in a document becomes that token, as
    in Megatron. include_special_tokens: also those that the tokenizer puts around each text, such as Llama's <s>.
    special_tokens: further ones, numbered after the others unless it knows them.
    UserError for a folder or name that gives no tokenizer.
    """

    def __init__(self, model: str, include_special_tokens: bool = False, special_tokens: Sequence[str] = ()):
        whole = _open(model)
        if special_tokens:
            whole.add_tokens(list(special_tokens), special_tokens=True)
        self.vocab_size = len(whole)
        self.eod = whole.eos_token_id if whole.eos_token_id is not None else whole.sep_token_id
        self._include = include_special_tokens
        self._fast = _without_limits(whole) if whole.is_fast else None
        self._slow = None if whole.is_fast else whole

    def encode(self, text: str) -> list[int]:
        text = mended(text)
        if self._fast:
            return self._fast.encode(text, add_special_tokens=self._include).ids
        return self._slow.encode(text, add_special_tokens=self._include)

    def decode(self, ids: Iterable[int]) -> str:
        return (self._fast or self._slow).decode([int(i) for i in ids], skip_special_tokens=False)


def _without_limits(whole):
    """The tokenizer in Rust, called without transformers' wrapping, which takes longer than short texts themselves."""
    fast = whole.backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = whole.split_special_tokens
    return fast


def _open(model: str):
    transformers = optional_package("transformers", "hf", "HuggingFaceTokenizer")
    try:
        with _quiet():
            # What lies here first: a run on many ranks must not ask the hub on each of them.
            return _from(transformers, model, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - parsers and the Rust library raise errors of every kind
        if os.path.exists(model):
            raise _unusable(model, error) from None
    if not _hub_answers():
        raise UserError(
            f"--tokenizer-model {model}: no such folder, not in Hugging Face's cache, and its hub cannot "
            "be reached; give a folder with tokenizer.json, or fetch it where there is a network"
        )
    try:
        return _from(transformers, model, local_files_only=False)
    except Exception as error:  # noqa: BLE001 - the same
        raise _unusable(model, error) from None


def _from(transformers, model: str, **where):
    return transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False, **where)


def _unusable(model: str, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        why = "it needs code of its own, which is not run here"
    else:
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return UserError(
        f"--tokenizer-model {model}: no tokenizer ({why}); give a folder that save_pretrained wrote, or "
        "a name on the hub"
    )


def _hub_answers() -> bool:
    """One question without the repetitions that the library makes for a minute where there is no network."""
    hub = optional_package("huggingface_hub", "hf", "HuggingFaceTokenizer")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # noqa: BLE001 - requests' or httpx's, by the library's version
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's remarks on what was not found."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
