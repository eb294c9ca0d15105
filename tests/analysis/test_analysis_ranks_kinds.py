"""Names, sizes and bandwidths of collectives, and ranks by a run's own medians."""

from dataclasses import replace

import pytest
from support.run_maker import folder, ranks, step
from support.wording import wording

from megatron_lite.analysis.ranks.calls import (
    bus_bytes,
    dtype_bytes,
    find_algorithm,
    find_collective_kind,
    message_bytes,
)
from megatron_lite.analysis.ranks.from_run import compare_ranks_of_run, only_lasting
from megatron_lite.analysis.ranks.process_groups import CALLER, guess_dimension, label_group
from megatron_lite.analysis.ranks.rank_results import Straggler
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.trace.columns import Collective, ProcessGroup, Shapes
from megatron_lite.mesh_axes import CONTEXT_HEADS, CONTEXT_POSITIONS, PIPELINE, REPLICATE, SHARD, TENSOR, find_dimension
from megatron_lite.model.loss import _FusedLosses
from megatron_lite.parallel.context_parallel import _GatherSequence, _JoinHeads, _SplitHeads
from megatron_lite.parallel.tensor_parallel import _ColumnLinear, _SumOverRanks


@pytest.mark.parametrize(
    ("name", "kind", "algorithm"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce", "ring, LL"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)", "all_reduce", "tree, LL128"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_NVLS_SIMPLE(...)", "reduce_scatter", "nvls, simple"),
        ("ncclDevKernel_AllGather_RING_LL(...)", "all_gather", "ring, LL"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv", "ring, simple"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "other", ""),
        ("nccl:_all_gather_base", "all_gather", ""),
        ("_allgather_base", "all_gather", ""),
        ("nccl:_reduce_scatter_base", "reduce_scatter", ""),
        ("alltoall_base", "all_to_all", ""),
        ("nccl:all_to_all", "all_to_all", ""),
        ("gloo:all_reduce", "all_reduce", ""),
        ("nccl:send 0->1", "send", ""),
        ("nccl:coalesced", "other", ""),
        ("gloo:barrier", "barrier", ""),
        ("nccl:reduce", "reduce", ""),
    ],
)
def test_kinds_and_algorithms(name, kind, algorithm):
    assert (find_collective_kind(name), find_algorithm(name)) == (kind, algorithm)


def test_widths():
    widths = {"Float": 4, "BFloat16": 2, "c10::Half": 2, "long int": 8, "Double": 8, "int": 4}
    widths |= {"Float8_e4m3fn": 1, "Bool": 1, "": None, "Quantum": None}
    assert {name: dtype_bytes(name) for name in widths} == widths


@pytest.mark.parametrize(
    ("kind", "given", "taken", "ranks", "expected"),
    [
        ("all_reduce", 100, 100, 4, 400),
        ("all_gather", 100, 400, 4, 1600),
        ("all_gather", 100, None, 4, 1600),
        ("all_gather", 100, None, None, None),
        ("reduce_scatter", 400, 100, 4, 1600),
        ("reduce_scatter", None, 100, 4, 1600),
        ("broadcast", None, 100, 4, 400),
        ("all_reduce", None, None, 4, None),
    ],
)
def test_bytes_as_nccl_tests_count_them(kind, given, taken, ranks, expected):
    what = Collective(kind, "0", ranks, given, taken, "Float", None)
    assert message_bytes(kind, what, None, ranks) == (expected, "Float")


def test_bytes_from_shapes_of_older_traces():
    shapes = Shapes(dims=((), (10, 2)), dtypes=("", "c10::BFloat16"))
    assert message_bytes("all_reduce", None, shapes, None) == (40, "c10::BFloat16")
    assert message_bytes("all_gather", None, shapes, 8) == (320, "c10::BFloat16")
    assert message_bytes("all_gather", None, shapes, None)[0] is None
    assert message_bytes("all_reduce", None, None, 8) == (None, "")


def test_bus_bytes():
    factors = {"all_reduce": 1.75, "all_gather": 0.875, "reduce_scatter": 0.875, "all_to_all": 0.875}
    for kind, factor in (factors | {"broadcast": 1, "reduce": 1, "send_recv": 1}).items():
        assert bus_bytes(kind, 1000, 8) == 1000 * factor, kind


def run_of(path, lines=4, steps=5, **told):
    """Every line's medians of three ranks: phases by name, each a tuple, or one per line; and own_backward_ms."""
    records = [step(n) for n in range(1, steps * lines + 1)]
    for line in range(lines):
        phases = {name: ms[line] if isinstance(ms, list) else ms for name, ms in told.items()}
        own = {"own_backward_ms": phases.pop("own_backward_ms")} if "own_backward_ms" in told else {}
        records.append(ranks(steps * line + 1, steps * line + steps, [20, 20, 20], phases_ms=phases, **own))
    return read_run(folder(path, records))


def of_run(path, forward, data=(1, 1, 1), **more):
    return compare_ranks_of_run(run_of(path, forward=forward, data=data, **more))


def test_steps_alone_name_a_straggler(tmp_path):
    found = of_run(tmp_path, (4, 4.2, 9))
    assert (found.straggler.rank, found.straggler.cause, found.straggler.phase) == (2, "compute", "forward")
    assert found.straggler.caused_wait_ms == pytest.approx(4.8) and found.straggler.share_last is None
    assert (
        found.critical_rank == 2
        and found.present == (0, 1, 2)
        and wording("analysis/waiting-in-collectives") in found.notes[0]
    )
    assert found.rows[0].step_ms == 20 and found.rows[0].data_wait_ms == 1 and found.rows[0].compute_ms is None
    assert of_run(tmp_path, (4, 4, 4), data=(1, 7, 1)).straggler.cause == "data_wait"


@pytest.mark.parametrize(
    "forward", [(4, 4.1, 4.3), (0.1, 0.1, 0.2), [(9, 4, 4), (4, 9, 4), (4, 4, 9), (9, 4, 4)], (4, None, 9)]
)
def test_alike_ranks_and_noise_that_changes_sides_have_none(tmp_path, forward):
    assert of_run(tmp_path, forward).straggler is None


def test_too_few_steps_and_no_ranks_say_nothing(tmp_path):
    assert of_run(tmp_path, (4, 4, 9), lines=1, steps=2).straggler is None
    assert compare_ranks_of_run(read_run(folder(tmp_path, [step(1), step(2)]))) is None


def with_own_backward(path, own_ms):
    phases = {"data": (1,) * 3, "forward": (4,) * 3, "backward": (9,) * 3, "optimizer_step": (1,) * 3}
    return run_of(path, **phases, own_backward_ms=own_ms)


def test_a_rank_that_is_slow_only_in_backward_is_named_by_its_own_part_of_it(tmp_path):
    found = compare_ranks_of_run(with_own_backward(tmp_path, (5, 9, 5))).straggler
    assert (found.rank, found.phase, found.caused_wait_ms) == (1, "backward", 4)


@pytest.mark.parametrize(
    ("own_ms", "kept"), [((5, 9, 5), True), ((5, 5.3, 5), False), ((9, 5, 5), False), ((5, None, 5), True)]
)
def test_a_straggler_of_a_profile_is_one_only_if_ordinary_steps_agree(tmp_path, own_ms, kept):
    run = with_own_backward(tmp_path, own_ms)
    seen = replace(compare_ranks_of_run(run), straggler=Straggler(1, 3.25, 0.8, "compute", 3.0), notes=())
    found = only_lasting(seen, run)
    assert (found.straggler is not None, found.notes == ()) == (kept, kept)
    if not kept:
        assert found.notes[0].startswith(wording("analysis/in-profiled-steps-others", 3.25, 1))


# --- what a process group is for


@pytest.mark.parametrize(
    ("description", "dimension"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("MODEL_PARALLEL_GROUP", "tensor and pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "context and data"),
        ("EMBEDDING_GROUP", "pipeline"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "tensor and data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data and expert"),
        ("experts", "expert"),
        ("replicas of experts", "data and expert"),
        ("mesh_tp", "tensor"),
        ("mesh_dp_shard_cp", "context and data"),
        ("mesh_fsdp", "data"),
        ("pipeline gradients, from end to end", "pipeline"),
        ("context", "context"),
        ("mesh_rows", "data"),
        ("default_pg", ""),
        ("undefined", ""),
    ],
)
def test_descriptions_name_a_dimension(description, dimension):
    assert find_dimension(description) == dimension


def test_groups_without_a_description_are_told_by_their_ranks():
    labels = {
        (): "",
        (0, 1, 2, 3): "all ranks",
        (2, 3): "2 adjacent ranks",
        (0, 2): "2 ranks, 2 apart",
        (0, 1, 3): "3 ranks",
    }
    assert {ranks: label_group(ProcessGroup("7", "undefined", ranks), 4) for ranks in labels} == labels


def test_names_of_this_trainers_functions_and_groups_are_known():
    """What it calls its autograd functions and process groups tells dimensions apart on gloo."""
    functions = {_ColumnLinear: "tensor", _SumOverRanks: "tensor", _FusedLosses: "tensor", _GatherSequence: "context"}
    functions |= {_SplitHeads: "context", _JoinHeads: "context"}
    for function, dimension in functions.items():
        name = f"autograd::engine::evaluate_function: {function.__name__}Backward"
        assert CALLER.search(name) and guess_dimension("all_reduce", name, "forward") == dimension
    assert find_dimension(CONTEXT_HEADS) == find_dimension(CONTEXT_POSITIONS) == "context"
    for name, dimension in ((REPLICATE, "data"), (SHARD, "data"), (TENSOR, "tensor"), (PIPELINE, "pipeline")):
        assert find_dimension(f"mesh_{name}") == dimension
