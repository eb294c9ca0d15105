"""Communication that no compute runs beside: what it is for, what it costs, and that no cost is told twice."""

import pytest
from support.finding_cases import BROADCAST, DISPATCH, GATHER, exchanges, on_gpu
from support.trace_maker import COMPUTE_STREAM
from support.training_maker import BF16_GEMM, gpu
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.ranks.calls import What, find_algorithm, find_collective_kind
from megatron_lite.analysis.ranks.exposed import Purpose, find_purpose, is_of_weights
from megatron_lite.analysis.trace.columns import ProcessGroup

COMMUNICATION = ("exposed-", "optimizer-communication", "all-reduce-tail", "no-overlap", "parameter-gather")


def what(kind: str, dtype="Float", group="") -> What:
    return What(kind, "", None, dtype, ProcessGroup("0", group), None)


@pytest.mark.parametrize(
    ("purpose", "call", "phase", "sharded"),
    [
        (Purpose.EXPERTS, what("dispatch"), "forward", None),
        (Purpose.EXPERTS, what("all_gather", group="EXPERT_MODEL_PARALLEL_GROUP"), "forward", None),
        (Purpose.ALL_TO_ALL, what("all_to_all"), "backward", None),
        (Purpose.TENSOR, what("all_reduce", group="TENSOR_MODEL_PARALLEL_GROUP"), "backward", None),
        (Purpose.CONTEXT, what("send_recv", group="mesh_cp"), "forward", None),
        (Purpose.STAGES, what("send_recv"), "forward", None),
        (Purpose.FORWARD, what("all_reduce"), "forward", None),
        (Purpose.GRADIENTS, what("all_reduce"), "backward", None),
        (Purpose.GRADIENTS, what("reduce_scatter", group="DATA_PARALLEL_GROUP"), "", True),
        (Purpose.WEIGHTS, what("all_gather", "BFloat16"), "forward", None),
        (Purpose.WEIGHTS, what("all_gather", "Byte"), "forward", True),
        (Purpose.OBJECTS, what("all_gather", "Byte"), "forward", None),
        (Purpose.OBJECTS, what("all_gather", "unsigned char"), "", False),
        (Purpose.OBJECTS, what("all_gather", "Long"), "forward", False),
        (Purpose.VALUES, what("all_gather", "Float"), "forward", False),
        (Purpose.OPTIMIZER, what("all_reduce"), "optimizer_step", None),
        (Purpose.REST, what("broadcast"), "forward", None),
        (Purpose.REST, what("other"), "", None),
    ],
)
def test_what_a_collective_is_for(purpose, call, phase, sharded):
    assert find_purpose(call, phase, sharded) == purpose


@pytest.mark.parametrize(
    ("dtype", "sharded", "weights"),
    [("Long", None, False), ("Int", True, False), ("", None, True), ("", False, False), ("Float8_e4m3fn", None, True)],
)
def test_numbers_that_weights_have(dtype, sharded, weights):
    assert is_of_weights(dtype, sharded) is weights


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*)", "combine"),
        ("void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(x)", "dispatch"),
        ("void moeA2ACombineKernel<x>(x)", "combine"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(x)", "all_reduce"),
        ("userbuffers_fp16_sum_inplace_gpu_rw", "all_reduce"),
        ("multimem_all_gather_kernel", "all_gather"),
        ("void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<x>(x)", "all_to_all"),
    ],
)
def test_kinds_of_libraries_beside_nccl(kernel, kind):
    assert find_collective_kind(kernel) == kind and find_algorithm(kernel) == ""


def found_in(folder, write) -> list:
    write(folder)
    return [one for one in analyze([folder]).findings if one.code.startswith(COMMUNICATION)]


def test_dispatch_on_the_stream_that_computes_cannot_overlap(tmp_path):
    shared = DISPATCH | {"stream": COMPUTE_STREAM}
    [one] = found_in(tmp_path / "a", on_gpu(reduce="after", collective=shared, world_size=16))
    assert one.code == "exposed-experts" and one.cost_ms == pytest.approx(1.2, rel=0.01) and not one.certain
    said = " | ".join(piece.text for piece in one.evidence)
    assert (
        wording("analysis/stream-that-computes") in said
        and wording("analysis/of-ranks-were-not", 15, 16, 1, 15) in said
    )
    [one] = found_in(tmp_path / "b", on_gpu(reduce="after", collective=DISPATCH))
    assert wording("analysis/stream-that-computes") not in " | ".join(piece.text for piece in one.evidence)


def test_communication_of_unknown_kind_is_told_by_its_kernel(tmp_path):
    unknown = {"name": None, "kernel": "void nvshmemi_transfer_rma<x>(x)"}
    [one] = found_in(tmp_path, on_gpu(before_forward=exchanges(3000, unknown)))
    assert one.code == "exposed-communication" and "nvshmemi_transfer_rma" in one.evidence[0].text


@pytest.mark.parametrize("parts", [{"reduce": "after"}, {"reduce": "tail"}, {"reduce": "tail", "collective": GATHER}])
def test_no_cost_is_told_twice(tmp_path, parts):
    """What a rule with a cause tells is not told again, and a broadcast beside it is."""
    found = found_in(tmp_path, on_gpu(before_forward=exchanges(1500, BROADCAST), **parts))
    costs = {one.code: one.cost_ms for one in found}
    assert costs["exposed-communication"] == pytest.approx(1.5, rel=0.02) and len(costs) == 2
    exposed_ms = analyze([tmp_path]).facts.critical.time.rows["exposed_communication"]
    assert sum(costs.values()) <= exposed_ms * 1.001


def test_a_gather_of_objects_is_no_gather_of_weights(tmp_path):
    objects = GATHER | {"dtype": "Byte"}
    [one] = found_in(tmp_path / "a", on_gpu(reduce="after", collective=objects))
    assert one.code == "exposed-communication" and one.title.startswith(wording("analysis/exposed-gathers-of-objects"))
    [one] = found_in(tmp_path / "b", on_gpu(reduce="after", collective=GATHER))
    assert one.code == "parameter-gather"


def test_under_distributed_data_parallel_no_weights_are_gathered(tmp_path):
    """A contrastive loss gathers features in forward; ranks hold whole weights."""

    def wraps(step):
        step.made.annotation("DistributedDataParallel.forward", step.host, step.host + 10)
        exchanges(1500, GATHER)(step)

    def write(folder):
        gpu(folder, before_forward=wraps)

    [one] = found_in(tmp_path, write)
    assert one.code == "exposed-communication"


ALL_TO_ALLS = {"name": "all_to_all", "kernel": "ncclDevKernel_SendRecv(x)"}
SCATTER = {"name": "_reduce_scatter_base", "kernel": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"}


@pytest.mark.parametrize(
    ("gradients", "gathered", "code", "title"),
    [
        (
            {},
            2**10,
            "exposed-communication",
            "gathers of features",
        ),  # whole gradients are summed: SyncBatchNorm, metrics
        (SCATTER, 2**24, "parameter-gather", "weight gathering"),  # ZeRO-1 and on
        ({}, 2**24, "parameter-gather", "weight gathering"),  # ZeRO-1 that sums whole gradients
    ],
)
def test_gathers_beside_whole_sums_of_gradients_are_no_weights(tmp_path, gradients, gathered, code, title):
    gathers = exchanges(3000, GATHER | {"elements": gathered})
    found = found_in(tmp_path, on_gpu(before_forward=gathers, reduce="after", collective=gradients))
    assert [one for one in found if one.code == code and title in one.title], found
    assert ("parameter-gather" in [one.code for one in found]) == (code == "parameter-gather")


@pytest.mark.parametrize(
    ("group", "words"), [("", "data of another rank"), ("PIPELINE_MODEL_PARALLEL_GROUP", "another stage")]
)
def test_sends_are_of_a_stage_only_where_the_group_says_so(tmp_path, group, words):
    """Ring attention sends keys and values from rank to rank, too."""
    told = {"backend": "nccl", "rank": 0, "world_size": 2}
    told["pg_config"] = [{"pg_name": "0", "pg_desc": group, "pg_size": 2, "ranks": [0, 1]}]
    sends = {"name": "send", "kernel": "ncclDevKernel_SendRecv(x)"}
    on_gpu(reduce="none", before_forward=exchanges(3000, sends), world_size=2, header={"distributedInfo": told})(
        tmp_path
    )
    report = analyze([tmp_path])
    assert words in report.verdict.sentence


@pytest.mark.parametrize(
    ("between", "code"),
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64> >(x)", "exposed-communication"),
        (BF16_GEMM, "exposed-experts"),
    ],
)
def test_all_to_alls_around_attention_are_of_sequences(tmp_path, between, code):
    """Ulysses swaps sequences for heads, and back behind attention."""

    def swaps(step):
        exchanges(1500, ALL_TO_ALLS)(step)
        step.kernel(between, 500, "aten::attention")
        exchanges(1500, ALL_TO_ALLS)(step)

    [one] = [one for one in found_in(tmp_path, on_gpu(before_forward=swaps)) if one.code.startswith("exposed-")]
    assert one.code == code and one.cost_ms == pytest.approx(3.0, rel=0.05)


def test_dispatch_of_ascend_is_communication(tmp_path):
    moe = {"name": None, "kernel": "MoeDistributeDispatch"}
    [one] = found_in(tmp_path, on_gpu(before_forward=exchanges(3000, moe)))
    assert one.code == "exposed-experts" and one.cost_ms == pytest.approx(3.0, rel=0.02)
