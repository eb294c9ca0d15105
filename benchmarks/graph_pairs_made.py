"""The changes that graph_pairs.py makes, and what stands for each in a dependency graph."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.edits.accumulation import sum_gradients_once
from megatron_lite.analysis.graph.edits.buckets import merge_collectives, resize_buckets, sum_in_backward
from megatron_lite.analysis.graph.edits.fusion import fuse_update
from megatron_lite.analysis.graph.edits.host_work import move_to_thread
from megatron_lite.analysis.graph.edits.loader import speed_up_loader, use_workers
from megatron_lite.analysis.graph.edits.recomputation import drop_recomputation
from megatron_lite.analysis.graph.edits.recording import leave_out_recording, measure_recording
from megatron_lite.analysis.graph.edits.saving import (
    Saving,
    add_saving,
    measure_saving,
    read_saving,
    save_every,
    save_in_thread,
)
from megatron_lite.analysis.graph.edits.stages import move_layers
from megatron_lite.analysis.graph.edits.straggler import level_rank
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
LOADER = Path(__file__).parent / "graph_scripts" / "loader.py"


@dataclass(frozen=True)
class Start:
    """One side of a pair.

    Attributes:
        ranks: How many ranks.
        flags: Of the trainer or the script; PLACE is the folder of the run.
        environ: Environment variables.
        is_trainer: It is the trainer, not graph_scripts/train.py.
    """

    ranks: int
    flags: str
    environ: Mapping[str, str] = field(default_factory=dict)
    is_trainer: bool = False


@dataclass(frozen=True)
class Recorded:
    """What a run before its change leaves.

    Attributes:
        ranks: The trace of each rank, and where its events belong.
        run: What the run says of itself.
    """

    ranks: Sequence[tuple[Trace, Placing]]
    run: Run

    def find_saving(self) -> Saving:
        """How the run saves: by steps.jsonl, else by the trace."""
        found = read_saving(self.run) or measure_saving(*self.ranks[0])
        assert found is not None
        return found


Edit = Callable[[Graph, Recorded], Graph]


def build(recorded: Recorded) -> Graph:
    """The graph of a run without the profiler's own work, with its checkpoints."""
    graph = leave_out_recording(build_graph(recorded.ranks), measure_recording(recorded.run))
    saving = read_saving(recorded.run)
    return add_saving(graph, saving) if saving else graph


def keep(graph: Graph, recorded: Recorded) -> Graph:
    """No edit stands for the change: nothing is claimed."""
    return graph


def in_order(*edits: Edit) -> Edit:
    """Several changes at once."""

    def apply(graph: Graph, recorded: Recorded) -> Graph:
        for edit in edits:
            graph = edit(graph, recorded)
        return graph

    return apply


def on_graph(edit: Callable[..., Graph], *parameters: object) -> Edit:
    """An edit that needs the graph only."""
    return lambda graph, recorded: edit(graph, *parameters)


def save_less(steps: int) -> Edit:
    """Checkpoints at another interval."""
    return lambda graph, recorded: save_every(graph, recorded.find_saving(), steps)


def save_beside(graph: Graph, recorded: Recorded) -> Graph:
    """Checkpoints in a thread."""
    return save_in_thread(graph, recorded.find_saving())


def merge_metrics(graph: Graph, recorded: Recorded) -> Graph:
    """One collective for all metrics."""
    return merge_collectives(graph, graph.find_phase("metrics") & graph.find_kind(ActivityKind.TRANSFER))


def sum_beside(graph: Graph, recorded: Recorded) -> Graph:
    """Sums of gradients in backward, in DistributedDataParallel's buckets."""
    sums = graph.find_phase("sum gradients") & graph.find_kind(ActivityKind.TRANSFER)
    return sum_in_backward(graph, sums, BUCKET_BYTES)


@dataclass(frozen=True)
class Pair:
    """A change that is made.

    Attributes:
        name: What changes.
        before: The first run.
        after: The second run.
        edit: What stands for the change.
    """

    name: str
    before: Start
    after: Start
    edit: Edit

    @property
    def folder(self) -> str:
        """The name as that of a folder."""
        return re.sub(r"\W+", "-", self.name)


TRAINER = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 16 --eval-iters 0 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --clip-grad 1 --no-report --log-interval 1000 "
    "--profile --use-pytorch-profiler --profile-ranks -1"
)
MOCK = "--mock-data"
EXTERNAL = f"--dataloader-type external --external-dataloader {LOADER}:yield_batches"


def train(ranks: int, flags: str, **environ: str) -> Start:
    """A run of the trainer."""
    return Start(ranks, f"{TRAINER} {flags}", environ, is_trainer=True)


def script(ranks: int, flags: str) -> Start:
    """A run of the script under watch."""
    return Start(ranks, flags)


SAVING = "--save PLACE/save --save-interval"
RECOMPUTING = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16"
MANY_LAYERS = "--num-layers 8 --hidden-size 64 --micro-batch-size 16 --pytorch-profiler-collect-shapes"
MANY_TENSORS = "--layers 100 --columns 96 --rows 192"
LARGER_TENSORS = "--layers 60 --columns 160 --rows 192"
LARGE_UPDATE = "--layers 12 --columns 512 --rows 128"
WIDE = "--layers 12 --columns 384 --rows 384"

PAIRS = (
    Pair(
        "trainer: loader twice as fast",
        train(1, EXTERNAL, READ_NUMBERS="20"),
        train(1, EXTERNAL, READ_NUMBERS="10"),
        on_graph(speed_up_loader, 2.0),
    ),
    Pair(
        "trainer: recomputation off",
        train(1, f"{MOCK} {RECOMPUTING}"),
        train(1, MOCK),
        on_graph(drop_recomputation),
    ),
    Pair(
        "trainer: buckets of 25 MiB, 2 ranks",
        train(2, f"{MOCK} {MANY_LAYERS} --ddp-bucket-size 100"),
        train(2, f"{MOCK} {MANY_LAYERS}"),
        on_graph(resize_buckets, BUCKET_BYTES),
    ),
    Pair(
        "trainer: checkpoint every 8 steps, not 2",
        train(1, f"{MOCK} {SAVING} 2"),
        train(1, f"{MOCK} {SAVING} 8"),
        save_less(8),
    ),
    Pair(
        "trainer: checkpoints in a thread",
        train(1, f"{MOCK} {SAVING} 4"),
        train(1, f"{MOCK} {SAVING} 4 --async-save"),
        save_beside,
    ),
    Pair(
        "trainer: pipeline of 6 + 2 layers to 4 + 4",
        train(2, f"{MOCK} {PIPELINE} --decoder-first-pipeline-num-layers 6"),
        train(2, f"{MOCK} {PIPELINE}"),
        on_graph(move_layers, (6, 2), (4, 4)),
    ),
    Pair(
        "trainer: a late rank of 2",
        train(2, EXTERNAL, LATE_NUMBERS="20"),
        train(2, EXTERNAL),
        on_graph(level_rank, 1),
    ),
    Pair(
        "trainer: layers compiled",
        train(1, MOCK),
        train(1, f"{MOCK} --torch-compile layers"),
        keep,
    ),
    Pair(
        "trainer: no recomputation, checkpoint every 8, not 2",
        train(1, f"{MOCK} {RECOMPUTING} {SAVING} 2"),
        train(1, f"{MOCK} {SAVING} 8"),
        in_order(on_graph(drop_recomputation), save_less(8)),
    ),
    Pair(
        "script: sleeping loader, 0 to 2 workers",
        script(1, f"{WIDE} --read-ms 60"),
        script(1, f"{WIDE} --read-ms 60 --workers 2"),
        on_graph(use_workers, 2),
    ),
    Pair(
        "script: computing loader, 0 to 1 worker",
        script(1, f"{WIDE} --read-numbers 12"),
        script(1, f"{WIDE} --read-numbers 12 --workers 1"),
        on_graph(use_workers, 1),
    ),
    Pair(
        "script: 30 metrics averaged at once, 2 ranks",
        script(2, f"{WIDE} --metrics 30"),
        script(2, f"{WIDE} --metrics 30 --metrics-at-once"),
        merge_metrics,
    ),
    Pair(
        "script: buckets of 25 MiB, 2 ranks",
        script(2, f"{MANY_TENSORS} --bucket-mb 0.01"),
        script(2, MANY_TENSORS),
        on_graph(resize_buckets, BUCKET_BYTES),
    ),
    Pair(
        "script: no_sync, 4 micro-batches, 2 ranks",
        script(2, f"{WIDE} --rows 96 --accumulate 4"),
        script(2, f"{WIDE} --rows 96 --accumulate 4 --no-sync"),
        on_graph(sum_gradients_once, 4),
    ),
    Pair(
        "script: optimizer for-loop to fused",
        script(1, f"{LARGE_UPDATE} --optimizer for-loop"),
        script(1, f"{LARGE_UPDATE} --optimizer fused"),
        on_graph(fuse_update, "optimizer_step"),
    ),
    Pair(
        "script: a late rank of 2",
        script(2, f"{WIDE} --late-numbers 12"),
        script(2, WIDE),
        on_graph(level_rank, 1),
    ),
    Pair(
        "script: layers compiled",
        script(1, "--layers 6 --columns 128 --rows 2048 --gates 6"),
        script(1, "--layers 6 --columns 128 --rows 2048 --gates 6 --compile"),
        keep,
    ),
    Pair(
        "script: checkpoint every 8 steps, not 1",
        script(1, f"{WIDE} --save-file PLACE/save.pt --save-every 1"),
        script(1, f"{WIDE} --save-file PLACE/save.pt --save-every 8"),
        save_less(8),
    ),
    Pair(
        "script: report in a thread",
        script(1, f"{WIDE} --report-ms 30 --report-numbers 6"),
        script(1, f"{WIDE} --report-ms 30 --report-numbers 6 --report-in-thread"),
        on_graph(move_to_thread, "write report"),
    ),
    Pair(
        "script: gradients summed by hand to DDP, 2 ranks",
        script(2, f"{WIDE} --sum-afterwards"),
        script(2, WIDE),
        sum_beside,
    ),
    Pair(
        "script: fused update, and 0 to 1 worker",
        script(1, f"{LARGE_UPDATE} --optimizer for-loop --read-numbers 12"),
        script(1, f"{LARGE_UPDATE} --optimizer fused --read-numbers 12 --workers 1"),
        in_order(on_graph(fuse_update, "optimizer_step"), on_graph(use_workers, 1)),
    ),
    Pair(
        "script: no late rank, and no_sync, 2 ranks",
        script(2, f"{WIDE} --rows 96 --accumulate 4 --late-numbers 10"),
        script(2, f"{WIDE} --rows 96 --accumulate 4 --no-sync"),
        in_order(on_graph(level_rank, 1), on_graph(sum_gradients_once, 4)),
    ),
    Pair(
        "script: buckets of 25 MiB for larger layers, 2 ranks",
        script(2, f"{LARGER_TENSORS} --bucket-mb 0.05"),
        script(2, LARGER_TENSORS),
        on_graph(resize_buckets, BUCKET_BYTES),
    ),
    Pair(
        "script: no_sync, 2 larger micro-batches, 2 ranks",
        script(2, f"{WIDE} --rows 192 --accumulate 2"),
        script(2, f"{WIDE} --rows 192 --accumulate 2 --no-sync"),
        on_graph(sum_gradients_once, 2),
    ),
)
HELD_BACK = (
    "trainer: no recomputation, checkpoint every 8, not 2",
    "script: fused update, and 0 to 1 worker",
    "script: buckets of 25 MiB for larger layers, 2 ranks",
    "script: no_sync, 2 larger micro-batches, 2 ranks",
)
