"""Trains Megatron-LM's own functional tests for a few steps, with their flags and layouts, at reduced sizes, on gloo.

python tests/train_configurations.py [WORD ...] [--ranks N] [--list]    those whose names hold one of the words

Kept are all flags but those of sizes, data, folders and lengths. A configuration that needs more than --ranks ranks (4) for
one replica is left out. Each is a line: its ranks, its last loss, or what it ended with.
"""

import argparse
import math
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.launch import pretrain
from support.megatron_functional import Configuration, read_configurations, write_words
from support.paths import REPO

from megatron_lite.config.expert_layers import parse_expert_layers
from megatron_lite.config.layout import expand_layout

MAX_RANKS = 4
LIMIT_S = 300
VOCABULARY = 127
# flags of what is replaced below, or of files that are not here
REPLACED = """
    --num-layers --encoder-num-layers --hidden-size --num-attention-heads --ffn-hidden-size --kv-channels --seq-length
    --encoder-seq-length --max-position-embeddings --num-query-groups --micro-batch-size --global-batch-size
    --rampup-batch-size --step-batch-size-schedule --train-iters --train-samples --lr-decay-iters --lr-decay-samples
    --lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction --eval-iters --eval-interval --eval-global-batch-size
    --data-path --data-cache-path --train-data-path --valid-data-path --test-data-path --data-args-path
    --per-split-data-args-path --split --vocab-file --merge-file --tokenizer-type --tokenizer-model --vocab-size
    --make-vocab-size-divisible-by --padded-vocab-size --tiktoken-pattern --save --load --pretrained-checkpoint
    --save-interval --save-retain-interval --exit-interval --exit-duration-in-mins --finetune --ckpt-step --auto-detect-ckpt-format
    --tensorboard-dir --wandb-project --wandb-entity --wandb-exp-name --wandb-save-dir --log-interval --num-experts
    --moe-layer-freq --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --decoder-first-pipeline-num-layers
    --decoder-last-pipeline-num-layers --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
    --pipeline-model-parallel-layout --recompute-num-layers --distributed-backend --profile --profile-step-start
    --profile-step-end --profile-ranks --iterations-to-skip --mock-data --num-workers --ddp-bucket-size --fim-data
    --fim-rate --fim-spm-rate --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
    --error-injection-rate --initial-loss-scale --lr-wsd-decay-iters --lr-wsd-decay-samples --phase-transition-iterations --use-checkpoint-args
""".split()  # noqa: SIM905


ACCOUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def take(one: Configuration, flag: str, default: str) -> str:
    """The value of a flag."""
    return (one.flags.get(flag) or [default])[0]


def count_ranks(one: Configuration) -> int:
    """The fewest ranks on which the configuration's layout is one replica."""
    tensor = int(take(one, "--tensor-model-parallel-size", "1"))
    context = int(take(one, "--context-parallel-size", "1"))
    stages = int(take(one, "--pipeline-model-parallel-size", "1"))
    block = 1
    if "--num-experts" in one.flags:
        split = int(take(one, "--expert-tensor-parallel-size", str(tensor)))
        block = int(take(one, "--expert-model-parallel-size", "1")) * split
    instances = int(take(one, "--num-distributed-optimizer-instances", "1"))
    return stages * instances * math.lcm(tensor * context, block)


def reduce_sizes(one: Configuration) -> list[str]:
    """The command line, with small sizes that its layout divides."""
    flags = {name: values for name, values in one.flags.items() if name not in REPLACED}
    stages = int(take(one, "--pipeline-model-parallel-size", "1"))
    chunks = count_chunks(one, stages)
    tensor = int(take(one, "--tensor-model-parallel-size", "1"))
    heads = 4 * max(tensor // 4, 1)
    # the embedding and the loss count as layers with these
    accounted = sum(flag in one.flags for flag in ACCOUNTED)
    layers = max(2, stages * chunks) - accounted
    ranks = count_ranks(one)
    context = int(take(one, "--context-parallel-size", "1"))
    data = ranks // (stages * tensor * context)
    at_once = int(take(one, "--microbatch-group-size-per-virtual-pipeline-stage", str(2 * stages)))
    small = {
        "--num-layers": layers, "--hidden-size": 16 * heads, "--num-attention-heads": heads, "--ffn-hidden-size": 64 * tensor,
        "--seq-length": 64, "--max-position-embeddings": 64, "--micro-batch-size": 1, "--global-batch-size": data * at_once,
        "--train-iters": 3, "--lr-warmup-iters": 0, "--eval-iters": 0, "--tokenizer-type": "NullTokenizer",
        "--vocab-size": VOCABULARY, "--make-vocab-size-divisible-by": 32, "--log-interval": 1, "--num-workers": 0,
    }  # fmt: skip
    if "--group-query-attention" in one.flags:
        small["--num-query-groups"] = max(heads // 2, tensor)
    if chunks > 1:
        small["--num-virtual-stages-per-pipeline-rank"] = chunks
    if "--fp16" in one.flags and "--loss-scale" not in one.flags:
        small["--initial-loss-scale"] = 4096  # from 2^32 on, three steps would be skipped
    if "--num-experts" in one.flags:
        small |= reduce_experts(one, layers)
    return [*write_words(flags), "--mock-data", *(str(word) for pair in small.items() for word in pair)]


def count_chunks(one: Configuration, stages: int) -> int:
    """Chunks of each stage."""
    layers = int(take(one, "--num-layers", take(one, "--encoder-num-layers", "0")))
    if "--pipeline-model-parallel-layout" in one.flags:
        return max(len(expand_layout(take(one, "--pipeline-model-parallel-layout", ""))) // stages, 1)
    if "--num-layers-per-virtual-pipeline-stage" in one.flags:
        return layers // stages // int(take(one, "--num-layers-per-virtual-pipeline-stage", "1"))
    return int(take(one, "--num-virtual-stages-per-pipeline-rank", "1"))


def reduce_experts(one: Configuration, layers: int) -> dict[str, object]:
    """Sizes of experts. A pattern of layers keeps its first and its last kind."""
    small: dict[str, object] = {
        "--num-experts": min(int(take(one, "--num-experts", "8")), 32),
        "--moe-ffn-hidden-size": 32,
    }
    if "--moe-shared-expert-intermediate-size" in one.flags:
        small["--moe-shared-expert-intermediate-size"] = 32
    frequency = take(one, "--moe-layer-freq", "1")
    if not frequency.isdigit():
        whole = parse_expert_layers(frequency, int(take(one, "--num-layers", "0")))
        small["--moe-layer-freq"] = f"([{int(whole[0])}]+[{int(whole[-1])}]*{layers - 1})"
    return small


def train(one: Configuration, folder: Path) -> tuple[int, str]:
    """(exit code, last loss or last line) of a short run."""
    done = pretrain(reduce_sizes(one), ranks=count_ranks(one), cwd=folder, seconds=LIMIT_S)
    found = re.findall(r"lm loss: ([\d.E+-]+)", done.out)
    errors = [line for line in (done.out + done.err).splitlines() if line.startswith("error:")]
    if done.code == 0 and len(found) == 3:
        return 0, f"loss {float(found[0]):.4f} -> {float(found[-1]):.4f}"
    return done.code or 1, "; ".join(errors) or (done.out + done.err)[-400:].replace("\n", " | ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--ranks", type=int, default=MAX_RANKS)
    parser.add_argument("--list", action="store_true", help="only say which")
    options = parser.parse_args()
    refused = (REPO / "tests/config/megatron_functional_refused.txt").read_text(encoding="utf-8")
    failed = 0
    known: dict[
        tuple[str, ...], tuple[int, str]
    ] = {}  # results by command line: many differ in lengths and folders only
    for name, one in read_configurations().items():
        chosen = any(word in name for word in options.words) and f"{name} |" not in refused
        if not chosen or count_ranks(one) > options.ranks:
            continue
        if options.list:
            print(name, count_ranks(one))
            continue
        words = (str(count_ranks(one)), *reduce_sizes(one))
        if words not in known:
            with tempfile.TemporaryDirectory() as folder:
                known[words] = train(one, Path(folder))
        code, text = known[words]
        failed += code != 0
        print(f"{name} on {count_ranks(one)}: {'trains, ' if code == 0 else f'exit {code}, '}{text}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
