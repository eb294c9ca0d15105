"""Memory and speed of a model that generates text: weights, and the keys and values of all tokens so far.

Memory is that of the tensors alone, without the server's workspace. Time is a bound, as in step_time, by memory
bandwidth alone: with hundreds of sequences at once arithmetic takes longer.
"""

from dataclasses import dataclass

from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.shape import ModelShape
from megatron_lite.formats.hardware import Processor
from megatron_lite.formats.run_record import LedgerRow, TimeRow
from megatron_lite.units import count

WEIGHT_BITS = {"fp32": 32, "fp16/bf16": 16, "int8/fp8": 8, "int4": 4}
CACHE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of an element of a key or value: they have the weights' precision


@dataclass(frozen=True)
class InferencePrediction:
    """A GPU that holds the whole model and generates for `batch` sequences of `tokens` tokens at once."""

    parameters: int
    tokens: int  # of each sequence, prompt included
    batch: int
    weights: tuple[LedgerRow, ...]  # by number format; one of them is needed
    cache: LedgerRow
    batches_beyond_weights: tuple[int, ...]  # for each of `weights`, the smallest batch whose cache is larger
    token_rows: tuple[TimeRow, ...]  # for each of `weights`: the next token of every sequence; empty without bandwidth

    def num_bytes(self, weights: LedgerRow) -> int:
        """Bytes of weights and cache."""
        return weights.num_bytes + self.cache.num_bytes

    def tokens_per_s(self, row: TimeRow) -> float:
        """The most tokens per second, of all sequences together."""
        return 1000 * self.batch / row.ms


def predict_inference(
    shape: ModelShape,
    batch: int = 1,
    tokens: int | None = None,
    processor: Processor | None = None,
    cache_bytes: int = CACHE_BYTES["bf16"],
) -> InferencePrediction:
    """Predict memory and speed of generating text.

    Args:
        shape: The model.
        batch: Sequences at once.
        tokens: Of each sequence; None: as many as in training.
        processor: The GPU; None: only memory is predicted.
        cache_bytes: Of one element of the cache.
    """
    tokens = shape.seq_length if tokens is None else tokens
    number = count_parameters(shape)
    weights = []
    for name, bits in WEIGHT_BITS.items():
        formula = f"{bits / 8:g} bytes x {count(number)} parameters"
        weights.append(
            LedgerRow(
                category="parameters",
                name=f"weights in {name}",
                num_bytes=count_weight_bytes(number, bits),
                formula=formula,
            )
        )
    formula = (
        f"2 x {shape.num_layers} layers x {shape.num_query_groups} heads x {shape.kv_channels} x "
        f"{count(tokens)} tokens x {count(batch)} sequences x {cache_bytes} bytes"
    )
    cache_size = count_kv_cache_bytes(shape, batch, tokens, cache_bytes)
    # every weight that takes part is read once for the whole batch, the cache wholly; of tables a token reads one row
    # only, but a tied word embedding is the output matrix, too
    words = 0 if shape.tied_embeddings else shape.padded_vocab_size
    positions = shape.max_position_embeddings if shape.position_embedding == "learned_absolute" else 0
    token_rows = []
    gb_s = (processor.memory_gb_s if processor else None) or 0.0
    for bits in WEIGHT_BITS.values() if gb_s else ():
        read = count_weight_bytes(number - (words + positions) * shape.hidden_size, bits)
        rate = f"({read / 1e9:.2f} GB of weights + {cache_size / 1e9:.2f} GB of cache) at {gb_s:,.0f} GB/s"
        ms = (read + cache_size) / gb_s / 1e6
        token_rows.append(
            TimeRow(
                name="next token of each sequence",
                ms=ms,
                bound="memory",
                formula=rate,
            )
        )
    one = count_kv_cache_bytes(shape, 1, tokens, cache_bytes)
    return InferencePrediction(
        parameters=number,
        tokens=tokens,
        batch=batch,
        weights=tuple(weights),
        cache=LedgerRow(
            category="other",
            name="cache of keys and values",
            num_bytes=cache_size,
            formula=formula,
        ),
        batches_beyond_weights=tuple(row.num_bytes // one + 1 for row in weights),
        token_rows=tuple(token_rows),
    )


def count_weight_bytes(parameters: int, bits: int) -> int:
    """Bytes of the weights alone; formats of 4 and 8 bits need some more for scales and zero points."""
    return -(-parameters * bits // 8)


def count_kv_cache_bytes(shape: ModelShape, batch: int, tokens: int, element_bytes: int = CACHE_BYTES["bf16"]) -> int:
    """Bytes of keys and values, 2*L*G*D*s*b*e: of L layers and G heads (fewer with grouped queries), each D wide.

    Args:
        shape: The model, with L, G and D.
        batch: b sequences at once.
        tokens: s of each, so far.
        element_bytes: e of one element.
    """
    return 2 * shape.num_layers * shape.num_query_groups * shape.kv_channels * tokens * batch * element_bytes
