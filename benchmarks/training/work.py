"""What is trained, the same for all contestants: one model, one batch, one precision, and the token file that all read."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.cli.corpus import library_sources
from megatron_lite.config.shape import ModelShape
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.units import MIB, count

VOCABULARIES = {"byte": 256, "bpe": 50304}
NAMES = ("layers", "hidden", "heads", "sequence", "micro_batch", "accumulation", "lr")
SIZES = {  # by device: of a laptop, and of examples/gpt3/train_gpt3_857m_distributed.sh
    "cpu": dict(zip(NAMES, (6, 384, 6, 256, 8, 2, 1e-3))),
    "cuda": dict(zip(NAMES, (24, 1024, 16, 2048, 4, 4, 1e-4))),
}
TEXT_BYTES = 8 * MIB
PAIRS = 256 * 256


@dataclass(frozen=True)
class Work:
    """A GPT-2 style training. `accumulation`: micro-batches per step of one rank; several ranks share them out.

    UserError for sizes that not every contestant can take.
    """

    device: str  # cpu | cuda
    precision: str  # fp32 | bf16 | fp16
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    micro_batch: int
    accumulation: int
    steps: int
    lr: float

    def __post_init__(self):
        if self.vocabulary % 128:
            raise UserError(f"--vocabulary {self.vocabulary}: must be a multiple of 128, else ours alone would pad it")
        if self.hidden % self.heads:
            raise UserError(f"--hidden {self.hidden}: is not divisible by --heads {self.heads}; choose another")

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.micro_batch * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def shape(self) -> ModelShape:
        """For counting floating-point operations."""
        return ModelShape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.heads,
            kv_channels=self.hidden // self.heads,
            ffn_hidden_size=4 * self.hidden,
            seq_length=self.sequence,
            max_position_embeddings=self.sequence,
            padded_vocab_size=self.vocabulary,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )

    def accumulation_of(self, ranks: int) -> int:
        """Micro-batches per step of each rank. UserError if they cannot be shared out evenly."""
        if self.accumulation % ranks:
            raise UserError(
                f"--accumulation {self.accumulation}: cannot be shared out to {ranks} ranks; give a multiple of that"
            )
        return self.accumulation // ranks

    def words(self) -> str:
        """For the table's head."""
        return (
            f"GPT {self.layers} x {self.hidden}, {self.heads} heads, sequence {self.sequence}, vocabulary "
            f"{self.vocabulary:,}, {self.precision}; {self.global_batch} sequences = {self.tokens_per_step:,} "
            f"tokens per step in micro-batches of {self.micro_batch}"
        )


def write_tokens(
    prefix: Path, vocabulary: int, text: Path | None, vocab_file: Path | None, merge_file: Path | None
) -> str:
    """Write PREFIX.bin and PREFIX.idx; returns what they hold, in words. UserError for files that do not serve.

    Megatron's .bin is nothing but ids, so that others can map it too.
    """
    documents, source = library_sources(Path(sysconfig.get_paths()["stdlib"]), TEXT_BYTES), "Python's own sources"
    if text is not None:
        try:
            documents, source = [text.read_text(encoding="utf-8")], text.name
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {text}: cannot be read as UTF-8 ({error}); give another file") from None
    # two bytes become one id, as often as they occur together: far more ids than bytes, and far from equally often
    ids = np.random.default_rng(0).permutation(PAIRS) % vocabulary
    if vocab_file:
        tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab_file), merge_file=str(merge_file))
        encode, kind = tokenizer.encode, "GPT-2's byte pairs"
    elif vocabulary == VOCABULARIES["byte"]:
        encode, kind = _bytes, "bytes"
    else:
        kind = f"pairs of bytes, spread pseudo-randomly over {count(vocabulary)} ids"

        def encode(document: str) -> np.ndarray:
            numbers = _bytes(document)
            numbers = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).astype(np.int64)
            return ids[numbers[:, 0] * 256 + numbers[:, 1]]

    with IndexedWriter(str(prefix), vocabulary) as writer:
        for document in documents:
            writer.add_document(encode(document))
    return f"{source}: {count(writer.written.tokens)} tokens, {kind}"


def _bytes(document: str) -> np.ndarray:
    return np.frombuffer(document.encode("utf-8"), np.uint8)
