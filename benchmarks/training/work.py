"""What is trained: one model, one batch, one precision, the same for all contestants."""

from dataclasses import dataclass

from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError

VOCABULARIES = {"byte": 256, "bpe": 50304}
SIZES = {  # by device: of a laptop, and of examples/gpt3/train_gpt3_857m_distributed.sh
    "cpu": {"layers": 6, "hidden": 384, "heads": 6, "sequence": 256, "micro_batch": 8, "accumulation": 2, "lr": 1e-3},
    "cuda": {
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "sequence": 2048,
        "micro_batch": 4,
        "accumulation": 4,
        "lr": 1e-4,
    },
}


@dataclass(frozen=True)
class Work:
    """A GPT-2 style training. `accumulation`: micro-batches per step of one rank; several ranks share them out."""

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

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.micro_batch * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def token_type(self) -> str:
        """numpy's name of the type that token files of this vocabulary have."""
        return "uint16" if self.vocabulary < 65_500 else "int32"

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


def check(work: Work):
    """UserError for sizes that not every contestant can take."""
    if work.vocabulary % 128:
        raise UserError(f"--vocabulary {work.vocabulary}: must be a multiple of 128, else ours alone would pad it")
    if work.hidden % work.heads:
        raise UserError(f"--hidden {work.hidden}: is not divisible by --heads {work.heads}; choose another")
