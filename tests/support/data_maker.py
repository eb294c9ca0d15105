"""Indexed data sets for tests, and the bytes of files; without torch."""

from pathlib import Path

from megatron_lite.data.indexed_writer import IndexedWriter


def write_data(prefix: Path | str, documents, vocab_size: int = 50_257) -> str:
    """A .bin/.idx pair; its prefix."""
    with IndexedWriter(str(prefix), vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def contents(folder: Path | str) -> dict[str, bytes]:
    """All files below, by their paths in it; of no folder there are none."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
