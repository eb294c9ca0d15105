"""Which device, pool and library a snapshot's memory belongs to, and what was seen of it."""

import json

import pytest
from support.finding_cases import gathering, graph_pools, holes, streams
from support.snapshot_maker import BACKWARD, CALL, INIT, STEP, MadeSnapshot, forward_stack, frames, training, write
from support.trace_maker import gpu_run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.memory.read import analyze_snapshot, read_snapshot
from megatron_lite.analysis.memory.stacks import Stacks
from megatron_lite.analysis.memory.trace_memory import measure_trace_memory
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.units import GIB, MIB

HOME = "/home/me/train.py:40 main"
DEEPSPEED, TORCH = "/venv/lib/python3.11/site-packages/deepspeed/runtime", "/venv/site-packages/torch"


def held(found: Snapshot) -> dict[str, int]:
    return {one.category: one.num_bytes for one in found.held}


def codes(report) -> list[str]:
    return [finding.code for finding in report.findings]


# --- devices


def on_devices(*made: MadeSnapshot) -> dict:
    """One process with several devices."""
    parts = [one.data() for one in made]
    segments = [segment | {"device": number} for number, data in enumerate(parts) for segment in data["segments"]]
    return {"segments": segments, "device_traces": [data["device_traces"][0] for data in parts]}


def small(events: int = 300) -> MadeSnapshot:
    made = MadeSnapshot(2**30)
    for _ in range(events):
        made.free(made.alloc(MIB, frames=forward_stack(3)))
    return made


def large(failed: bool = False, went_on: bool = False) -> MadeSnapshot:
    made = MadeSnapshot()
    for _ in range(6):
        made.alloc(10 * GIB, frames=INIT)
    if failed:
        made.out_of_memory(8 * GIB, 2 * GIB, forward_stack(77, "prefill"))
    if went_on:
        made.alloc(8 * GIB, frames=forward_stack(78))
    return made


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_device_whose_request_failed_is_told(tmp_path, number):
    devices = [small(), small(), training(), training()]
    devices[number] = large(failed=True)
    report = analyze([write(on_devices(*devices), tmp_path / "s.pickle")])
    [found] = report.facts.snapshots
    assert (found.device, found.oom.held_bytes, found.oom.requested_bytes) == (number, 60 * GIB, 8 * GIB)
    assert wording("analysis/request-for-gib-failed", "8.00", 77, "60.00") in report.verdict.sentence
    assert f"on GPU {number}" in report.verdict.sentence and codes(report)[0] == "out-of-memory"
    assert found.notes[0].startswith(wording("analysis/this-is-device-file", number))


def test_a_failure_counts_more_than_a_higher_peak_elsewhere(tmp_path):
    failed = small()
    failed.out_of_memory(8 * GIB, 0, forward_stack(77))
    found = analyze_snapshot(on_devices(failed, large()), tmp_path)
    assert found.device == 0 and "device 1 at 60.00 GiB" in found.notes[0]


def test_without_a_failure_the_device_with_the_most_memory(tmp_path):
    report = analyze([write(on_devices(small(), large()), tmp_path / "s.pickle")])
    assert (
        report.facts.snapshots[0].device == 1
        and wording("analysis/memory-peaks-at-gib", "60.00") in report.verdict.sentence
    )
    # by what tensors held, though all is given back at the end
    freed = MadeSnapshot(2**33)
    freed.free(freed.alloc(2**32, frames=forward_stack(1)))
    assert analyze_snapshot(on_devices(freed, small()), tmp_path).device == 0


def test_a_failure_that_the_program_got_around_is_no_headline(tmp_path):
    report = analyze([write(on_devices(large(failed=True, went_on=True)), tmp_path / "s.pickle")])
    [found] = report.facts.snapshots
    assert found.oom.went_on and not found.ran_out and wording("analysis/memory-peaks-at") in report.verdict.sentence
    [finding] = [one for one in report.findings if one.code == "out-of-memory"]
    assert not finding.certain


def test_of_several_ranks_the_one_whose_memory_ran_out_is_shown(tmp_path):
    training(layers=30).write(tmp_path, 0)
    failed = training()
    failed.out_of_memory(GIB, 0, forward_stack(77))
    failed.write(tmp_path, 1)
    report = analyze([tmp_path])
    assert (
        report.facts.highest_snapshot.rank == 1
        and wording("analysis/request-for-gib-failed-2", "1.00") in report.verdict.sentence
    )


# --- a state without a history, and memory that nothing is known of


def test_a_state_without_history_is_no_peak(tmp_path):
    data = training().data()
    data["device_traces"] = [[]]
    report = analyze([write(data, tmp_path / "s.pickle")])
    assert report.verdict.confidence == "low" and "peak" not in report.verdict.sentence and codes(report) == []


@pytest.mark.parametrize(("mib", "confidence"), [(1, "high"), (400, "low")])
def test_memory_without_a_category_lowers_the_confidence(tmp_path, mib, confidence):
    made = training()
    made.reserved = 2**32
    made.alloc(mib * MIB, frames=frames("/home/me/tools.py:3 build", HOME, "/home/me/train.py:90 <module>"))
    verdict = analyze([write(made.data(), tmp_path / "s.pickle")]).verdict
    assert verdict.confidence == confidence


def test_a_record_without_stacks_is_not_told_with_confidence(tmp_path):
    data = training().data()
    for entry in [*data["device_traces"][0], *(block for part in data["segments"] for block in part["blocks"])]:
        entry["frames"] = []
    report = analyze([write(data, tmp_path / "s.pickle")])
    assert report.verdict.confidence == "low" and report.facts.snapshots[0].peak_bytes == 29 * MIB


def test_memory_that_ran_out_is_said_before_the_time(tmp_path):
    trace = gpu_run(steps=5)
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps(trace.data()))
    write(on_devices(large(failed=True)), tmp_path / "oom.pickle")
    report = analyze([tmp_path])
    assert report.facts.critical is not None
    assert report.verdict.sentence.startswith(wording("analysis/request-for-gib-failed-at", "8.00", 77))


# --- private pools


def read_made(write_case, folder) -> Snapshot:
    write_case(folder)
    return read_snapshot(folder / "snapshot_rank0.pickle")


def test_what_lies_in_private_pools_is_no_fragmentation(tmp_path):
    found = read_made(graph_pools(12, pools=2), tmp_path)
    pools = [(pool.pool, pool.reserved_bytes, pool.allocated_bytes, pool.of_graphs) for pool in found.private_pools]
    assert sorted(pools) == [("(1, 0)", 12 * GIB, 0, True), ("(2, 0)", 12 * GIB, 0, True)]
    assert found.fragmentation.reserved_bytes == found.fragmentation.allocated_bytes == 9 * GIB
    report = analyze([tmp_path])
    assert codes(report) == ["private-pool"]
    assert (report.findings[0].cost_bytes, report.findings[0].gain_bytes) == (24 * GIB, 12 * GIB)
    assert "graph_pool_handle" in report.findings[0].advice


def test_fragmentation_beside_a_pool_is_found_as_ever(tmp_path):
    holes(4)(tmp_path)
    assert "fragmentation" in codes(analyze([tmp_path]))
    assert read_snapshot(tmp_path / "snapshot_rank0.pickle").private_pools == ()


@pytest.mark.parametrize("form", ["tuple", "list", "event", "expandable"])
def test_pools_are_known_from_segments_and_from_events(tmp_path, form):
    """JSON has lists. A segment that is gone at the end is known by its events only. Expandable segments are mapped."""
    made = MadeSnapshot()
    segment = made.segment(4 * GIB, pool=(0, 3))
    kept = made.alloc(GIB, frames=forward_stack(5), at=segment)
    data = made.data()
    if form == "list":
        data["segments"][0]["segment_pool_id"] = [0, 3]
    if form == "event":
        del data["segments"][0]["segment_pool_id"]
        for event in data["device_traces"][0]:
            event["pool_id"] = (0, 3)
        data["segments"] = [data["segments"][0] | {"segment_pool_id": (0, 3)}]
    if form == "expandable":
        data["segments"][0]["is_expandable"] = True
        data["device_traces"][0][0]["action"] = "segment_map"
    found = analyze_snapshot(data, tmp_path)
    [pool] = found.private_pools
    assert (pool.pool, pool.reserved_bytes, pool.allocated_bytes) == ("(0, 3)", 4 * GIB, GIB)
    assert kept and not pool.of_graphs and found.fragmentation.reserved_bytes == 0


def test_a_pool_whose_code_captures_graphs_is_theirs(tmp_path):
    made = MadeSnapshot()
    segment = made.segment(4 * GIB, pool=(0, 3))
    made.alloc(
        GIB, frames=frames("/home/me/m.py:3 forward", "/x/vllm/compilation/cuda_graph.py:90 __call__"), at=segment
    )
    assert analyze_snapshot(made.data(), tmp_path).private_pools[0].of_graphs


def test_a_failed_request_says_what_lies_out_of_its_reach(tmp_path):
    made = MadeSnapshot()
    segment = made.segment(20 * GIB, pool=(0, 1))
    made.free(made.alloc(20 * GIB, frames=forward_stack(5), at=segment))
    made.alloc(4 * GIB, frames=forward_stack(6))
    made.out_of_memory(8 * GIB, GIB, forward_stack(7))
    made.write(tmp_path)
    report = analyze([tmp_path])
    assert report.facts.snapshots[0].oom.unused_private_bytes == 20 * GIB
    assert {"out-of-memory", "private-pool"} == set(codes(report))
    assert next(one for one in report.findings if one.code == "private-pool").certain


# --- memory that waits for another stream


def test_memory_that_waits_for_a_stream_is_neither_weights_nor_activations(tmp_path):
    found = read_made(streams(waits=True), tmp_path)
    assert held(found)["awaiting free"] == 4 * GIB
    waited = [site for site in found.sites if site.category == "awaiting free"]
    assert sum(site.num_bytes for site in waited) == 4 * GIB
    assert "awaiting free" not in held(read_made(streams(waits=False), tmp_path / "near"))


@pytest.mark.parametrize("state", ["active_awaiting_free", "active_pending_free"])
@pytest.mark.parametrize("requested", [True, False])
def test_blocks_that_wait_at_the_end(tmp_path, state, requested):
    """The request stands in the record, or came before it."""
    made = MadeSnapshot()
    first, second = made.alloc(GIB, frames=INIT), made.alloc(GIB, frames=INIT)
    made.give_back(second)
    made.alloc(MIB, frames=forward_stack(3))
    data = made.data()
    for block in (block for segment in data["segments"] for block in segment["blocks"]):
        if block["address"] == second:
            block["state"] = state
    if not requested:
        events = data["device_traces"][0]
        data["device_traces"] = [[event for event in events if event["addr"] not in (first, second)]]
    found = analyze_snapshot(data, tmp_path)
    at_end = {one.category: one.num_bytes for one in found.highest}
    assert at_end["awaiting free"] == GIB
    if not requested:
        assert held(found)["parameters"] == GIB


def test_waiting_memory_does_not_change_the_curve(tmp_path):
    made = training()
    kept = made.alloc(3 * MIB, frames=forward_stack(50))
    made.give_back(kept)
    other = made.alloc(MIB, frames=forward_stack(51))
    made.complete(kept)
    made.free(other)
    found = read_snapshot(made.write(tmp_path))
    assert found.curve[-1].allocated == 9 * MIB
    assert all(sum(moment.by_category) == moment.allocated for moment in found.curve)


# --- frames of C, and names with their classes


def with_c_frames(stack: list[dict]) -> list[dict]:
    """As a Python with debug symbols has them, between the frames of Python."""
    native = frames(
        "/usr/local/src/conda/python-3.12.3/Objects/methodobject.c:537 cfunction_call",
        "/usr/local/src/conda/python-3.12.3/Objects/call.c:240 _PyObject_MakeTpCall",
        "/usr/local/src/conda/python-3.12.3/Include/internal/pycore_ceval.h:89 _PyEval_EvalFrame",
        "/pytorch/aten/src/ATen/native/cuda/Blas.cpp:300 at::native::addmm_out_cuda_impl",
        "/usr/include/c++/13/functional:590 std::function<void ()>::operator()",
    )
    return [*native[3:], *(frame for one in stack for frame in (*native[:3], one))]


def test_c_frames_hide_no_line_of_python(tmp_path):
    plain = training()
    data = plain.data()
    for event in data["device_traces"][0]:
        python = any(frame["line"] for frame in event["frames"])
        event["frames"] = with_c_frames(event["frames"]) if python else event["frames"]
    found, wanted = analyze_snapshot(data, tmp_path), analyze_snapshot(plain.data(), tmp_path)
    assert (held(found), found.sites, found.peak_phase) == (held(wanted), wanted.sites, wanted.peak_phase)


def site_of(*names: str) -> str:
    stacks = Stacks()
    return stacks.site(stacks.number(frames(*names)))


def test_the_line_of_the_users_code_is_shown():
    assert (
        site_of("/a/b.cu:3 kernel", "/a/c.h:4 launch", f"{TORCH}/functional.py:9 einsum", "/me/m.py:5 f") == "m.py:5 f"
    )
    assert site_of("/a/b.cpp:3 run(int)", "/a/torch/csrc/x.cpp:4 torch::run") == ""
    assert site_of("<ipython-input-3-abc>:7 <module>") == "<ipython-input-3-abc>:7 <module>"
    assert site_of("/usr/bin/mytool:7 main") == "mytool:7 main"
    compiled = "/tmp/torchinductor_me/ab/cabxyz.py:40 call"
    assert site_of(compiled, f"{TORCH}/_inductor/output_code.py:3 __call__", "/me/m.py:5 f") == "m.py:5 f"
    stacks = Stacks()
    profiled = [{"filename": "none", "line": 0, "name": "/me/gpt.py(37): forward"}]
    assert stacks.site(stacks.number(profiled)) == "gpt.py:37 forward"


def test_qualified_names_are_known(tmp_path):
    plain = training()
    data = plain.data()
    for event in data["device_traces"][0]:
        event["frames"] = [
            frame | {"name": f"Model.<locals>.Block.{frame['name']}"} if frame["line"] else frame
            for frame in event["frames"]
        ]
    assert held(analyze_snapshot(data, tmp_path)) == held(analyze_snapshot(plain.data(), tmp_path))


# --- libraries that share out the weights

ZERO, FSDP = f"{DEEPSPEED}/zero", f"{TORCH}/distributed/fsdp"
ADAM = f"{TORCH}/optim/adamw.py:200 step"
KNOWN = {
    "gathered parameters": [
        [f"{ZERO}/partition_parameters.py:1300 _all_gather_coalesced", f"{ZERO}/partitioned_param_coordinator.py:5 fetch"],
        [f"{ZERO}/partition_parameters.py:1300 _allgather_params_coalesced"],
        [f"{ZERO}/partition_parameters.py:700 wait", f"{ZERO}/parameter_offload.py:3 pre_sub_module_forward_function"],
        [f"{ZERO}/partitioned_param_coordinator.py:310 __all_gather_params"],
        [f"{ZERO}/mics.py:100 _hierarchical_all_gather_params"],
        [f"{FSDP}/_common_utils.py:9 _alloc_storage", f"{FSDP}/_flat_param.py:1408 _alloc_padded_unsharded_flat_param"],
        [f"{FSDP}/_runtime_utils.py:300 _unshard", f"{FSDP}/fully_sharded_data_parallel.py:800 forward"],
        [f"{FSDP}/_fully_shard/_fsdp_param_group.py:300 unshard"],
        [f"{FSDP}/_flat_param.py:1408 FlatParamHandle._alloc_padded_unsharded_flat_param"],
        [
            f"{FSDP}/_fully_shard/_fsdp_collectives.py:59 allocate",
            f"{FSDP}/_fully_shard/_fsdp_collectives.py:351 foreach_all_gather",
        ],
        [f"{FSDP}/_fully_shard/_fsdp_param.py:1069 alloc_storage", f"{FSDP}/_fully_shard/_fsdp_param.py:825 alloc_all_gather_outputs"],
        [f"{TORCH}/distributed/_composable/fsdp/_fsdp_param.py:400 init_all_gather_outputs"],
        ["/x/megatron_fsdp/param_and_grad_buffer.py:9 fetch_bucket"],
    ],
    "parameters": [
        [f"{ZERO}/partition_parameters.py:1100 _partition_param", f"{ZERO}/partition_parameters.py:1003 _convert_to_deepspeed_param"],
        [f"{ZERO}/stage3.py:500 _create_fp16_partitions_with_defragmentation", f"{ZERO}/stage3.py:300 __init__"],
        [f"{TORCH}/_utils.py:3 _flatten_dense_tensors", f"{ZERO}/stage_1_and_2.py:1190 flatten_dense_tensors_aligned", f"{ZERO}/stage_1_and_2.py:440 __init__"],
    ],
    "master weights": [
        [f"{ZERO}/stage3.py:900 _create_fp32_partitions", f"{ZERO}/stage3.py:400 _setup_for_real_optimizer"],
        [f"{ZERO}/stage_1_and_2.py:492 __init__"],
        [f"{DEEPSPEED}/bf16_optimizer.py:150 _setup_for_real_optimizer", f"{DEEPSPEED}/bf16_optimizer.py:100 __init__"],
        [f"{DEEPSPEED}/fp16/fused_optimizer.py:90 __init__"],
    ],
    "gradients": [
        [f"{ZERO}/stage3.py:420 _setup_for_real_optimizer", f"{ZERO}/stage3.py:300 __init__"],
        [f"{ZERO}/stage_1_and_2.py:600 setup_buckets"],
        [f"{ZERO}/partition_parameters.py:1800 _partition_gradient"],
    ],
    "KV cache": [
        ["/x/vllm/v1/worker/gpu_model_runner.py:9 _allocate_kv_cache_tensors"],
        ["/x/sglang/srt/mem_cache/memory_pool.py:300 _create_buffers"],
        [f"{TORCH}/functional.py:3 cat", "/x/transformers/cache_utils.py:120 update", "/x/transformers/models/llama.py:3 forward"],
    ],
    "moments": [
        [ADAM, f"{ZERO}/stage3.py:1000 _optimizer_step", f"{ZERO}/stage3.py:950 initialize_optimizer_states"],
        [ADAM, f"{ZERO}/stage_1_and_2.py:700 initialize_optimizer_states", f"{ZERO}/stage_1_and_2.py:500 __init__"],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("category", "names"), [(category, one) for category, some in KNOWN.items() for one in some])
def test_what_a_library_holds_is_known_by_its_frames(tmp_path, category, names):
    made = MadeSnapshot()
    made.alloc(MIB, frames=INIT)
    made.alloc(4 * GIB, frames=frames(*names, HOME, "/home/me/train.py:90 <module>"))
    made.alloc(MIB, frames=forward_stack(3))
    assert held(analyze_snapshot(made.data(), tmp_path))[category] >= 4 * GIB


def test_the_library_gathers_inside_of_the_phase_around_it(tmp_path):
    """Steps are found as without the library, and gathered weights are neither activations nor weights."""
    gather = frames(f"{ZERO}/partition_parameters.py:1234 _all_gather_dtype", CALL, "/home/me/train.py:90 <module>")
    step = frames(f"{ZERO}/stage3.py:2100 step", f"{DEEPSPEED}/engine.py:9 step", "/home/me/train.py:96 <module>")
    made = MadeSnapshot()
    made.alloc(GIB, frames=INIT)
    for _ in range(3):
        activations = []
        for _ in range(4):
            whole = made.alloc(GIB, frames=gather)
            activations.append(made.alloc(GIB // 4, frames=forward_stack(3)))
            made.free(whole)
        for one in reversed(activations):
            made.free(made.alloc(GIB // 8, frames=BACKWARD))
            made.free(one, frames=BACKWARD)
        made.free(made.alloc(MIB, frames=step), frames=STEP)
    found = analyze_snapshot(made.data(), tmp_path)
    assert len(found.steps) == 3 and found.peak_bytes == 3 * GIB
    assert held(found) == {"parameters": GIB, "gathered parameters": GIB, "activations": GIB}
    assert found.gathered.library == "DeepSpeed" and found.gathered.blocks == 1


@pytest.mark.parametrize(("pieces", "alive", "finds"), [(12, 12, True), (12, 3, False), (48, 27, False), (3, 3, False)])
def test_gathered_weights_of_the_same_phase(tmp_path, pieces, alive, finds):
    """A layer of fully_shard is several pieces. All of what forward gathered being whole at its end is a finding; two layers
    and what belongs to no layer are not."""
    gather = frames(f"{FSDP}/_fully_shard/_fsdp_param.py:825 alloc_all_gather_outputs", CALL)
    made, whole = MadeSnapshot(), []
    made.step(1)
    made.alloc(4 * GIB, "setup")
    for _ in range(pieces):
        whole.append(made.alloc(GIB, "step 1/forward", gather))
        if len(whole) > alive:
            made.free(whole.pop(0))
    made.alloc(GIB, "step 1/forward")
    made.write(tmp_path)
    report = analyze([tmp_path])
    gathered = report.facts.snapshots[0].gathered
    assert (gathered.blocks, gathered.kept_blocks) in ((alive, 0), (alive + 1, 0))
    assert ("gathered-parameters" in codes(report)) == finds


def test_gathered_weights_that_stay_are_a_finding(tmp_path):
    gathering(kept=12)(tmp_path)
    report = analyze([tmp_path])
    [finding] = [one for one in report.findings if one.code == "gathered-parameters"]
    assert (finding.cost_bytes, finding.gain_bytes) == (12 * GIB, 10 * GIB) and finding.certain
    assert "stage3_max_live_parameters" in finding.advice
    assert "partition_parameters.py:1234 _all_gather_dtype" in finding.evidence[1].where


# --- memory events of a trace


def test_of_a_traces_gpus_the_one_with_the_highest_peak(tmp_path):
    made = gpu_run(steps=2)
    for number in range(20):
        made.memory(number * 10, 1000, 1000 * (number + 1), 4096)
    made.memory(500, 10**9, 10**9, 2 * 10**9, device=1)
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(json.dumps(made.data()))
    [trace] = read_traces(path)
    found = measure_trace_memory(trace, attribute_events(trace))
    assert (found.device, found.peak_bytes, found.other_peaks) == (1, 10**9, ((0, 20_000),))


def test_a_failure_that_was_survived_does_not_choose_the_device(tmp_path):
    survived = small()
    survived.out_of_memory(MIB, 0, forward_stack(7))
    survived.free(survived.alloc(2 * MIB, frames=forward_stack(3)))
    assert analyze_snapshot(on_devices(survived, large()), tmp_path).device == 1


def test_a_block_that_waits_without_a_request_in_the_record(tmp_path):
    made = MadeSnapshot()
    made.alloc(GIB, frames=INIT)
    made.alloc(GIB, frames=forward_stack(3))
    data = made.data()
    data["segments"][1]["blocks"][0]["state"] = "active_pending_free"
    assert held(analyze_snapshot(data, tmp_path)) == {"parameters": GIB, "awaiting free": GIB}
