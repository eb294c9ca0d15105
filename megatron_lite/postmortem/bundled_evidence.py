"""The evidence of a failed job in a bundle: the records of all files that the job left, in one file of JSON."""

from pathlib import Path

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import EVIDENCE_FILE
from megatron_lite.postmortem.evidence import JobEvidence
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import read_foreign

BUNDLED_EVIDENCE_SCHEMA = 1
MAX_BUNDLED_BYTES = 2**29
MAX_MEMORY_PER_BUNDLED_BYTE = 60
_HEAD = b'{"megatron_lite_evidence":'


class BundledEvidence(msgspec.Struct, kw_only=True):
    """Content of the evidence in a bundle."""

    # of this format; raised when a reader of the old form would be wrong. It stands first: a file is known by it
    schema: int = msgspec.field(default=BUNDLED_EVIDENCE_SCHEMA, name="megatron_lite_evidence")
    evidence: JobEvidence


def is_bundled_evidence(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is the evidence of a bundle."""
    return head.startswith(_HEAD)


def encode_evidence(evidence: JobEvidence) -> bytes:
    """The content of the file."""
    return msgspec.json.encode(BundledEvidence(evidence=evidence))


def read_bundled_evidence(path: Path) -> JobEvidence:
    """Read the evidence of a bundle. UserError, one line, for a file that cannot be read."""
    try:
        content = read_foreign(path, MAX_BUNDLED_BYTES)
        with limit_memory(len(content), MAX_MEMORY_PER_BUNDLED_BYTE):
            found = msgspec.json.decode(content, type=BundledEvidence)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: is no evidence of a bundle ({error}); ask for the bundle again.") from None
    if found.schema != BUNDLED_EVIDENCE_SCHEMA:
        raise UserError(f"{path}: has form {found.schema}, and this version reads {BUNDLED_EVIDENCE_SCHEMA}; update.")
    return found.evidence


def find_bundled(folder: Path) -> Path | None:
    """The evidence of a bundle in a folder, which stands for all of the folder's files."""
    path = folder / EVIDENCE_FILE
    return path if path.is_file() and not path.is_symlink() else None
