"""Makes run folders (run.json, steps.jsonl) with known answers, as megatron_lite/formats has them."""

import json

from megatron_lite.config.model_size import step_flops
from megatron_lite.config.shape import ModelShape

MIB = 2**20
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8}
SHAPE |= {"ffn_hidden_size": 128, "seq_length": 16, "max_position_embeddings": 16, "padded_vocab_size": 128}
ARGS = {"training": {"micro_batch_size": 2}, "profile": {"profile": False}}
PLAN = {"args": ARGS, "settings": {"micro_batch_size": 2}, "shape": SHAPE, "world": {"size": 2}}
RECORD = {"schema": 1, "status": "finished", "started": "2020-01-01T00:00:00+0000", "plan": PLAN}
RECORD |= {f"sample_flops_{name}": step_flops(ModelShape(**SHAPE), 1, name == "causal") for name in ("causal", "full")}
RECORD |= {
    "process": {"host": "h", "pids": "p", "pid": 1, "started_ticks": 1},
    "hardware": {"device": "X", "peak_tflops": 0.5},
}


def step(number, ms=10.0, iteration=None, **more):
    made = {
        "kind": "step",
        "iteration": iteration or number,
        "step": number,
        "batch_size": 4,
        "ms": ms,
        "phases_ms": {"forward": 5.0},
    }
    made |= {"loss": 2.0, "grad_norm": 1.0, "loss_scale": 1.0, "skipped": False, "host_memory_bytes": 100 * MIB}
    return made | more


def ranks(first, last, step_ms, **more):
    steps = [last - first + 1] * len(step_ms)
    return {"kind": "ranks", "ranks": {"iterations": [first, last], "steps": steps, "step_ms": step_ms, **more}}


def folder(path, lines, record=RECORD):
    path.mkdir(exist_ok=True)
    if record is not None:
        (path / "run.json").write_text(record if isinstance(record, str) else json.dumps(record))
    if lines is not None:
        texts = (line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (path / "steps.jsonl").write_text("".join(texts))
    return path
