"""Memory that is held and serves nobody now: between tensors, in private pools, for another stream,
for other layers."""

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    could_not_look,
    find_lost_memory,
    rule,
    saw,
)
from megatron_lite.analysis.memory.memory_results import Fragmentation, Gathered, PrivatePool, Snapshot
from megatron_lite.analysis.run_facts import Facts, sum_category
from megatron_lite.units import MIB, counted, size

MAX_FRAGMENTED_SHARE = 0.10  # of what is reserved: segments of 20 MiB leave some of each free by design
MIN_UNUSED_BYTES = 256 * MIB
HELPS = 0.05  # of what is reserved, that the replay must save to be worth a word
EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@rule("fragmentation", "memory reserved but not used", "memory", record=Recording.SNAPSHOT)
def find_fragmentation(facts: Facts) -> Finding | Observation:
    """The allocator holds much more memory than tensors use.

    Meaning: PyTorch takes memory in segments and cuts them up. Free pieces between live ones cannot serve a larger
        request, and another segment is taken: reserved grows, allocated does not. An out-of-memory error can come with
        gigabytes free.
    Measured: reserved against allocated at the moment of the largest reservation in a snapshot with a history, in the
        allocator's default pool: what is free in private pools is no fragmentation (see private-pool). Whether
        expandable segments would help is found by replaying the record with them, not by rule of thumb.
    Cost: the difference. Reserved memory is no leak: it is kept for reuse.
    Do: expandable segments where the replay shows a gain; else sizes that repeat: a constant batch and length.
    Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    False alarm: a peak that was freed a moment before; then the reserve serves the next step.
    """
    # what is reserved at a single moment may be a cache that the next step fills
    recorded = [one for one in facts.snapshots if not one.simulated and one.events]
    if not recorded:
        return could_not_look()
    worst = max(recorded, key=lambda one: _measure_between(one.fragmentation))
    held = worst.fragmentation
    reserved = size(held.reserved_bytes)
    unused_bytes = _measure_between(held)
    if unused_bytes < max(MAX_FRAGMENTED_SHARE * held.reserved_bytes, MIN_UNUSED_BYTES):
        return saw(Evidence(f"{size(unused_bytes)} of {reserved} that are reserved lie between tensors", worst.source))
    text = f"{reserved} are reserved for tensors of {size(held.allocated_bytes)}: {size(unused_bytes)} lie between them"
    gain_bytes = _measure_replayed_gain(held)
    remedy = GROWING_SEGMENTS if gain_bytes else CONSTANT_SIZES
    return find_lost_memory(
        worst,
        unused_bytes,
        gain_bytes,
        text,
        remedy.advice,
        Evidence(_describe_replay(held, gain_bytes)),
        flags=remedy.flags,
        certain=gain_bytes is not None,
    )


GROWING_SEGMENTS = Remedy(f"let segments grow: {EXPANDABLE_SEGMENTS}", (EXPANDABLE_SEGMENTS,))
CONSTANT_SIZES = Remedy("keep batch and sequence length constant, so that freed pieces fit again")


def _measure_between(held: Fragmentation) -> int:
    """Measure what is reserved and lies between tensors, in bytes."""
    return held.reserved_bytes - held.allocated_bytes


def _measure_replayed_gain(held: Fragmentation) -> int | None:
    """Measure what expandable segments save in a replay, in bytes; None where it is little or not known."""
    if held.expandable or held.replay_reserved_bytes is None:
        return None
    gain_bytes = held.reserved_bytes - held.replay_reserved_bytes
    return gain_bytes if gain_bytes >= HELPS * held.reserved_bytes else None


def _describe_replay(held: Fragmentation, gain_bytes: int | None) -> str:
    """Describe whether expandable segments would help. gain_bytes: what they save; None for too little."""
    if held.expandable:
        return "expandable segments were on"
    if held.replay_reserved_bytes is None:
        return "the record cannot be replayed, so that nothing is known of expandable segments"
    would = f"save {size(gain_bytes)}" if gain_bytes else "not help"
    replayed = size(held.replay_reserved_bytes)
    return f"replayed with expandable segments {replayed} would be reserved: they would {would}"


SHARE_POOL = "torch.cuda.graph(..., pool=torch.cuda.graph_pool_handle())"


@rule("private-pool", "memory kept in private pools", "memory", record=Recording.SNAPSHOT)
def find_private_pool(facts: Facts) -> Finding | Observation:
    """Memory lies free in a pool that only CUDA graphs, or a torch.cuda.MemPool, can use.

    Meaning: a CUDA graph replays with the addresses of its capture. Its memory stays in a private pool after the
        capture, although no tensor holds it, and no other request can use it, not even one that fails. A graph per
        batch size, each with a pool of its own, keeps as many peaks. torch.cuda.use_mem_pool keeps a pool likewise.
    Measured: segments whose segment_pool_id is not the default pool's: what they reserve, and what tensors hold of it,
        when a request failed or else at the end of the record. Of several pools all but the largest could be saved by
        sharing.
    Cost: what lies free there. Replays of the graph need it.
    Do: capture all graphs with one pool, the largest batch first; capture fewer sizes; delete graphs that are not
        replayed any more; allocate outside of torch.cuda.use_mem_pool what need not lie in the pool.
    Flags: torch.cuda.graph(..., pool=torch.cuda.graph_pool_handle()); in vLLM cudagraph_capture_sizes, in SGLang
        --cuda-graph-max-bs.
    False alarm: graphs that pay for their memory, on a device that has room.
    """
    recorded = [one for one in facts.snapshots if not one.simulated]
    most = max((one for one in recorded if one.private_pools), key=_measure_unused, default=None)
    if most is None:
        return saw(Evidence("no private pool", recorded[0].source)) if recorded else could_not_look()
    unused_bytes = _measure_unused(most)
    if unused_bytes < max(MAX_FRAGMENTED_SHARE * _measure_reserved(most), MIN_UNUSED_BYTES):
        return saw(Evidence(f"{size(unused_bytes)} lie free in private pools", most.source))
    pools = most.private_pools
    plural = "s" if len(pools) > 1 else ""
    owner = "CUDA graphs"
    advice = f"share one pool among the graphs ({SHARE_POOL}), or capture fewer sizes"
    if not all(pool.of_graphs for pool in pools):
        owner += " or a torch.cuda.MemPool"
        advice += "; keep out of use_mem_pool what need not be there"
    lie_free = f"{size(unused_bytes)} lie free in {len(pools)} private pool{plural} of {owner}"
    text = f"{lie_free}, out of reach of other requests"
    shown = [Evidence(_describe_pool(pool), pool.site or most.source) for pool in pools[:MAX_SHOWN]]
    # of pools that are shared the largest one remains
    gain_bytes = sum(pool.reserved_bytes for pool in pools[1:])
    return find_lost_memory(
        most,
        unused_bytes,
        gain_bytes or None,
        text,
        advice,
        *shown,
        certain=most.ran_out,
    )


def _describe_pool(pool: PrivatePool) -> str:
    """Describe what a private pool reserves, and what of it tensors hold."""
    reserved = f"{size(pool.reserved_bytes)} reserved"
    return f"pool {pool.pool}: {reserved}, {size(pool.allocated_bytes)} held by tensors"


def _measure_unused(one: Snapshot) -> int:
    """Measure what lies free in private pools, in bytes."""
    return sum(max(pool.reserved_bytes - pool.allocated_bytes, 0) for pool in one.private_pools)


def _measure_reserved(one: Snapshot) -> int:
    """Measure what all pools reserve, in bytes."""
    in_private_pools = sum(pool.reserved_bytes for pool in one.private_pools)
    return one.fragmentation.reserved_bytes + in_private_pools


MAX_AWAITING_SHARE = 0.10  # of the peak: less decides nothing


@rule("awaiting-free", "memory that waits for another stream", "memory", needs="snapshot")
def find_awaiting_free(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Memory that the program gave back waits for another stream before it can be used again.

    Meaning: Tensor.record_stream says that another stream uses a tensor. When the program drops the tensor, its memory
        is kept until that stream has passed the point, and the host runs ahead of it: several layers' memory may wait.
    Measured: allocations at the snapshot's peak whose free was requested and not completed (blocks in the state
        active_awaiting_free).
    Cost: those bytes at the moment that decides.
    Do: let the stream that allocated wait for the other one and drop the tensor then, instead of record_stream; keep a
        reference until the work is waited for. FSDP1: keep limit_all_gathers=True, its default. NCCL before torch 2.8:
        TORCH_NCCL_AVOID_RECORD_STREAMS=1, the default since. Side streams for copies: fewer batches ahead.
    Flags: none; PYTORCH_CUDA_ALLOC_CONF does not help.
    False alarm: a moment that passes before anything large is asked for.
    """
    held_bytes = sum_category(most, "awaiting free")
    text = f"{size(held_bytes)} of the peak of {size(most.peak_bytes)} were given back and wait for another stream"
    if held_bytes < max(MAX_AWAITING_SHARE * most.peak_bytes, MIN_UNUSED_BYTES):
        return saw(Evidence(text, most.source))
    sites = [site for site in most.sites if site.category == "awaiting free"]
    shown = []
    for site in sites[:MAX_SHOWN]:
        shown.append(Evidence(f"{size(site.num_bytes)} in {counted(site.blocks, 'piece')}", site.site))
    advice = (
        "wait for the other stream instead of Tensor.record_stream; FSDP1: keep limit_all_gathers=True; "
        "NCCL before torch 2.8: TORCH_NCCL_AVOID_RECORD_STREAMS=1"
    )
    return find_lost_memory(most, held_bytes, held_bytes, text, advice, *shown)


MIN_GATHERED_SHARE = 0.20  # of the peak
MIN_GATHERED = 4  # pieces
MIN_WHOLE_SHARE = 0.75  # of the pieces that a phase gathers: with two layers at a time it is less
RELEASES = {
    "DeepSpeed": (
        "lower stage3_max_live_parameters, stage3_max_reuse_distance and stage3_prefetch_bucket_size; "
        "end GatheredParameters contexts before training goes on"
    ),
    "FSDP1": (
        "ShardingStrategy.FULL_SHARD with limit_all_gathers=True; "
        "end summon_full_params contexts before training goes on"
    ),
    "FSDP2": "fully_shard(..., reshard_after_forward=True), and fewer modules prefetched",
}
RELEASES_OURS = Remedy("--use-torch-fsdp2 instead of --use-distributed-optimizer", ("--use-torch-fsdp2",))


@rule("gathered-parameters", "gathered weights that stay whole", "memory", needs="snapshot")
def find_gathered_parameters(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Weights that were gathered for a layer are still whole when other layers run.

    Meaning: with ZeRO-3 and FSDP each rank keeps a part of the weights, and a layer is gathered before it runs. One or
        two layers are whole at a time if each is given back after its use; else the whole model comes together again.
    Measured: at the peak of a snapshot that fills most of the device, allocations whose stack leads through the
        library's code that gathers (library_frames.tsv). Most of them were gathered in a phase that was over, or most
        of what the phase gathers is whole at once.
    Cost: those bytes but for two pieces.
    Do: let the library give each layer back: in DeepSpeed lower stage3_max_live_parameters, stage3_max_reuse_distance
        and stage3_prefetch_bucket_size; in FSDP FULL_SHARD with limit_all_gathers, or reshard_after_forward=True; end
        contexts that gather (GatheredParameters, summon_full_params) before training goes on; wrap layers, not the
        whole model.
    Flags: --use-torch-fsdp2 instead of --use-distributed-optimizer, which keeps weights from forward to backward.
    False alarm: a device with room, where weights are kept whole to save a second gathering.
    """
    gathered = most.gathered
    if gathered is None:
        return saw(Evidence("no gathered weights at the peak", most.source))
    pieces = counted(gathered.blocks, "piece")
    text = f"{size(gathered.num_bytes)} of the peak of {size(most.peak_bytes)} are gathered weights in {pieces}"
    is_little = gathered.blocks < MIN_GATHERED or gathered.num_bytes < MIN_GATHERED_SHARE * most.peak_bytes
    if is_little or not facts.is_tight(most):
        return saw(Evidence(text, most.source))
    kept = gathered.kept_blocks
    in_phase = gathered.gathered_in_phase
    at_once = gathered.blocks - kept
    is_kept = 2 * kept >= gathered.blocks
    is_most_of_phase = in_phase >= MIN_GATHERED and at_once >= MIN_WHOLE_SHARE * in_phase
    if not is_kept and not is_most_of_phase:
        return saw(Evidence(text, most.source))
    which = f"{at_once} of the {in_phase} pieces that {most.peak_phase or 'the phase'} gathers are whole at once"
    if is_kept:
        which = f"{kept} of them were gathered in a phase that was over"
    remedy = _advise_release(facts, gathered)
    two_pieces_bytes = 2 * gathered.num_bytes // gathered.blocks
    return find_lost_memory(
        most,
        gathered.num_bytes,
        gathered.num_bytes - two_pieces_bytes,
        text,
        remedy.advice,
        Evidence(which, gathered.site),
        flags=remedy.flags,
        certain=is_kept,
    )


def _advise_release(facts: Facts, gathered: Gathered) -> Remedy:
    """Choose how the library that gathers gives each layer's weights back."""
    sharding = facts.plan.sharding
    if sharding is not None and not sharding.gathers_twice:
        return RELEASES_OURS
    return Remedy(RELEASES.get(gathered.library, "give each layer's weights back after its use"))
