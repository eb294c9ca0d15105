"""Memory and speed of generating text: known answers for models that everybody knows."""

from dataclasses import replace

import pytest

from megatron_lite.config.shape import ModelShape
from megatron_lite.formats.hardware import match_processor
from megatron_lite.formats.run_record import LedgerRow
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.inference import count_kv_cache_bytes, count_weight_bytes, predict_inference
from megatron_lite.planner.state_size import state_bytes
from megatron_lite.units import GIB

GB = 10**9
LLAMA_7B = ModelShape(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32, kv_channels=128,
    ffn_hidden_size=11008, seq_length=4096, max_position_embeddings=4096, padded_vocab_size=32000,
    position_embedding="rope", normalization="RMSNorm", activation="swiglu", linear_bias=False, qkv_bias=False,
    tied_embeddings=False,
)  # fmt: skip
LARGER = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_query_groups": 40}
LLAMA_13B = replace(LLAMA_7B, **LARGER, ffn_hidden_size=13824)


def gb(row: LedgerRow) -> float:
    return row.num_bytes / GB


def test_round_numbers_of_every_guide():
    """7B: 28, 14, 7 and 3.5 GB; 14 + 14 + 84 = 112 GB in training, without activations. 13B: 26 to run, 208 to train."""
    assert [count_weight_bytes(7 * GB, bits) / GB for bits in (32, 16, 8, 4)] == [28, 14, 7, 3.5]
    training = state_bytes(7 * GB, "fp16", False, "adam")
    assert (training["parameters"] / GB, training["gradients"] / GB, sum(training.values()) / GB) == (14, 14, 112)
    assert count_weight_bytes(13 * GB, 16) / GB == 26
    assert sum(state_bytes(13 * GB, "fp16", False, "adam").values()) / GB == 208


def test_llama_7b_and_13b():
    seen, larger = predict_inference(LLAMA_7B), predict_inference(LLAMA_13B)
    assert (seen.parameters, seen.tokens, seen.batch) == (6_738_415_616, 4096, 1)
    names = [f"weights in {name}" for name in ("fp32", "fp16/bf16", "int8/fp8", "int4")]
    assert [row.name for row in seen.weights] == names
    assert [gb(row) for row in seen.weights] == pytest.approx([26.95, 13.48, 6.74, 3.37], abs=0.005)
    assert seen.weights[1].formula == "2 bytes x 6,738,415,616 parameters"
    assert seen.weights[3].formula == "0.5 bytes x 6,738,415,616 parameters"
    assert seen.cache.num_bytes == 2 * GIB
    assert seen.cache.formula == "2 x 32 layers x 32 heads x 128 x 4,096 tokens x 1 sequences x 2 bytes"
    assert seen.num_bytes(seen.weights[1]) == seen.weights[1].num_bytes + 2 * GIB
    assert larger.parameters == 13_015_864_320 and gb(larger.weights[1]) == pytest.approx(26.03, abs=0.005)
    assert larger.cache.num_bytes == count_kv_cache_bytes(LLAMA_13B, 1, 4096) == 2 * 40 * 5120 * 4096 * 2


def test_the_cache_outgrows_the_weights():
    """With 4,096 tokens from the 7th sequence on in 16 bits; 8 sequences hold 16 GiB."""
    seen = predict_inference(LLAMA_7B, batch=8)
    assert seen.cache.num_bytes == 16 * GIB > seen.weights[1].num_bytes
    assert seen.batches_beyond_weights == (13, 7, 4, 2)
    for row, batch in zip(seen.weights, seen.batches_beyond_weights):
        assert (
            count_kv_cache_bytes(LLAMA_7B, batch - 1, 4096)
            <= row.num_bytes
            < count_kv_cache_bytes(LLAMA_7B, batch, 4096)
        )


def test_groups_tokens_batch_and_width_scale_the_cache():
    grouped = predict_inference(replace(LLAMA_7B, num_query_groups=8))
    assert grouped.cache.num_bytes == 2 * GIB // 4 and "x 8 heads x" in grouped.cache.formula
    assert predict_inference(LLAMA_7B, tokens=1024).cache.num_bytes == GIB // 2
    assert predict_inference(LLAMA_7B, batch=3, tokens=4096, cache_bytes=1).cache.num_bytes == 3 * GIB


def test_time_of_a_token():
    """The weights, but for the rows of the embedding that nobody asked for, and the cache, once per token."""
    seen = predict_inference(LLAMA_7B, processor=find_processor("A100"))
    read = 2 * (6_738_415_616 - 32000 * 4096) + 2 * GIB
    assert seen.token_rows[1].ms == pytest.approx(read / 2039e6) and seen.token_rows[1].bound == "memory"
    assert seen.token_rows[1].formula == "(13.21 GB of weights + 2.15 GB of cache) at 2,039 GB/s"
    assert seen.tokens_per_s(seen.token_rows[1]) == pytest.approx(132.7, abs=0.1)
    assert [row.ms for row in seen.token_rows] == sorted((row.ms for row in seen.token_rows), reverse=True)
    eight = predict_inference(LLAMA_7B, batch=8, processor=find_processor("A100"))  # which share the weights
    assert 1 < eight.tokens_per_s(eight.token_rows[1]) / seen.tokens_per_s(seen.token_rows[1]) < 8


def test_tables_of_which_a_token_reads_a_row_take_no_time_and_an_unknown_bandwidth_tells_none():
    tied, learned = replace(LLAMA_7B, tied_embeddings=True), replace(LLAMA_7B, position_embedding="learned_absolute")
    h200 = find_processor("H200")
    plain, *others = (predict_inference(shape, processor=h200) for shape in (LLAMA_7B, tied, learned))
    assert all(other.token_rows == plain.token_rows for other in others)
    assert others[1].parameters == 6_738_415_616 + 4096**2
    assert predict_inference(LLAMA_7B).token_rows == ()
    assert predict_inference(LLAMA_7B, processor=match_processor("NVIDIA A100-PG509-200")).token_rows == ()
