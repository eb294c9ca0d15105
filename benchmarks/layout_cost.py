"""Two ranks, steps in turns: tensor parallel and a pipeline beside Megatron-Core (the packages of tests), ZeroBubble beside 1F1B.

    python -m benchmarks.layout_cost [tensor] [pipeline] [schedule]

Prints medians of CPU and wall time of a step on each gloo rank with one thread, and their ratio, ours or ZeroBubble first.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.distributed as dist
from support.launch import flags, on_ranks, plan_of

STEPS, FIRST = 30, 5  # the first ones are not counted
SPLIT = {"tensor": "--tensor-model-parallel-size 2", "pipeline": "--pipeline-model-parallel-size 2"}
SHAPE = (
    "--num-layers 4 --num-attention-heads 4 --attention-backend unfused --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --padded-vocab-size 512 --vocab-size 511 "
    "--lr-decay-style constant --train-iters 1000000 "
)
SMALL = SHAPE + "--hidden-size 128 --seq-length 64 --max-position-embeddings 64 --global-batch-size 4"
LARGE = SHAPE + "--hidden-size 512 --seq-length 256 --max-position-embeddings 256 --global-batch-size 2"


def make_step(words: str, world):
    """step(tokens_BT, labels_BT) of this trainer."""
    from megatron_lite.data.batch import Batch
    from megatron_lite.optim.optimizer import Optimizer
    from megatron_lite.parallel.groups import make_groups
    from megatron_lite.train.build_replica import build_replica
    from megatron_lite.train.real_backend import RealBackend
    from megatron_lite.train.step import TrainingStep

    plan, cpu = plan_of(flags(words), world), torch.device("cpu")
    groups = make_groups(plan, cpu)
    replica = build_replica(plan, groups, RealBackend(cpu))
    optimizer = Optimizer(plan, replica.parameters, cpu, replica.sum_over_ranks, replica.counted)
    step = TrainingStep(plan, replica, optimizer, lambda batch: Batch(*batch, None, None, None))
    step.make.device = cpu
    return plan, lambda batch: step(zip(*(whole.split(1) for whole in batch)), 0, lambda _: contextlib.nullcontext())


def make_theirs(kind: str, plan, world):
    """The same step of Megatron-Core, a sequence at a time."""
    from test_checkpoint_megatron_core import Theirs, parallel_state, plan_for, pretend_on_ranks

    pretend_on_ranks()
    parallel_state.initialize_model_parallel(**{f"{kind}_model_parallel_size": world.size})
    theirs = Theirs(plan_for("fp32"), plan.shape, stage=(world.rank, world.size) if kind == "pipeline" else None)
    length = plan.shape.seq_length
    blocked = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def train(batch):
        theirs.optimizer.zero_grad()
        for tokens, labels in zip(*(whole.split(1) for whole in batch)):
            positions = torch.arange(length).expand_as(tokens)
            (theirs.model(tokens, positions, blocked, labels=labels).mean() / 4).backward()
        theirs.optimizer.step()
        theirs.scheduler.step(4)

    return theirs.train_stage if kind == "pipeline" else train


def compare(world, kind: str):
    """For on_ranks: prints one line."""
    from test_checkpoint_megatron_core import batches

    torch.set_num_threads(1)
    names = ("ours", "Megatron-Core")
    if kind == "schedule":
        names, words = ("ZeroBubble", "1F1B"), f"{LARGE} {SPLIT['pipeline']}"
        plan, first = make_step(f"{words} --pipeline-schedule ZeroBubble", world)
        _, second = make_step(words, world)
    else:
        plan, first = make_step(f"{SMALL} {SPLIT[kind]}", world)
        second = make_theirs(kind, plan, world)
    times = [[], []]
    for batch in batches(plan.shape, STEPS):
        fed = [whole[: plan.batch.final] for whole in batch]
        for train, own in zip((first, second), times):
            dist.barrier()
            start = time.process_time(), time.perf_counter()
            train(fed)
            own.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    (cpu, wall), (their_cpu, their_wall) = (
        [1000 * statistics.median(column) for column in zip(*own[FIRST:])] for own in times
    )
    ratios = f"ratios CPU {cpu / their_cpu:.2f}, wall {wall / their_wall:.2f}"
    print(
        f"{kind}, rank {world.rank}: {names[0]} {cpu:.1f} ms CPU {wall:.1f} ms wall, "
        f"{names[1]} {their_cpu:.1f} ms CPU {their_wall:.1f} ms wall: {ratios}"
    )


def main(kinds: list[str]):
    for kind in kinds or [*SPLIT, "schedule"]:
        with tempfile.TemporaryDirectory() as folder:
            for output in on_ranks(compare, Path(folder), kind):
                print(output.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
