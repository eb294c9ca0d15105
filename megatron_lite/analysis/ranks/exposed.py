"""Communication of one rank that no compute runs beside, by what it is for. Each moment counts once."""

import math
from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, difference, joined, union
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.kernels.kernel_words import get_kernel_role
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT, Calls, What, collect_calls
from megatron_lite.analysis.ranks.process_groups import is_fully_sharded
from megatron_lite.analysis.ranks.rank_results import OTHER
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.mesh_axes import find_dimension
from megatron_lite.phases import Phase

# what a collective is for; of several under way at once, the first one here is charged
EXPERTS = "experts"  # of tokens among experts, by a library's names or the group's
ALL_TO_ALL = "all-to-all"  # of tokens, sequences or rows of embedding tables: the trace does not say
TENSOR = "tensor"  # among ranks that split layers
CONTEXT = "context"  # among ranks that split sequences
FORWARD = "forward"  # a sum in forward of a group without a name
STAGES = "stages"  # from one rank to another
OPTIMIZER = "optimizer"  # inside the optimizer's step
OBJECTS = "objects"  # of pickled Python objects and whole numbers
VALUES = "values"  # gathers of features, statistics or metrics: ranks hold whole weights
WEIGHTS = "weights"
GRADIENTS = "gradients"
REST = "rest"
PURPOSES = (EXPERTS, ALL_TO_ALL, TENSOR, CONTEXT, FORWARD, STAGES, WEIGHTS, GRADIENTS, OPTIMIZER, OBJECTS, VALUES, REST)

MANY_SUMS = 2  # times the bytes that are gathered
_OF_GRADIENTS = (Phase.BACKWARD.value, Phase.GRAD_SYNC.value)
MOSTLY_ATTENTION = 0.5  # of all-to-alls that attention must come before or behind
MIN_COMPUTE_SHARE = 0.1  # of all compute that a stream must run to be one that computes
# numbers of samples, tokens, sizes: torch's and NCCL's spellings of whole numbers, squashed
_WHOLE_NUMBERS = ("long", "longint", "int", "int64", "int32", "short", "shortint", "bool", "char", "signedchar", "int8")
_BYTES = ("byte", "unsignedchar", "uint8")


@dataclass(frozen=True)
class Exposed:
    """Communication for one purpose; means per steady step."""

    purpose: str  # of PURPOSES
    ms: float  # while nothing computes
    calls: float
    kinds: tuple[str, ...]  # "dispatch", "all_reduce"; most exposed first
    phases: tuple[str, ...]  # most exposed first; "" for unknown
    kernel: str  # the most exposed one's name
    on_compute_stream_ms: float  # of ms, on a stream that computes: it cannot overlap
    row: int  # the longest event


def measure_exposed(one: RankFacts, world_size: int | None) -> tuple[Exposed, ...]:
    """Most exposed first; () without collectives in steady steps."""
    calls = collect_calls(one.trace, one.placing, world_size)
    kept = np.flatnonzero(one.placing.counts[calls.rows]) if len(calls) else np.empty(0, np.int64)
    if not len(kept):
        return ()
    sharded = shows_sharding(one, calls)
    purposes: dict[str, list[int]] = defaultdict(list)
    for at in kept.tolist():
        purposes[find_purpose(calls.whats[at], calls.phase[at], sharded)].append(at)
    exchanges = np.array(purposes.get(ALL_TO_ALL, []), np.int64)
    if len(exchanges) and _surround_attention(one, calls, exchanges):
        purposes[CONTEXT] += purposes.pop(ALL_TO_ALL)
    shared = _find_shared_streams(one, calls)
    taken: Cover = calls.compute
    found = []
    for purpose in PURPOSES:
        rows = np.array(purposes.get(purpose, []), np.int64)
        if not len(rows):
            continue
        exposed = difference(union(calls.start_ns[rows], calls.end_ns[rows]), taken)
        taken = joined(taken, exposed)
        found.append(_describe(one, calls, rows, exposed, purpose, shared))
    return tuple(sorted(found, key=lambda part: -part.ms))


def find_rows_for(one: RankFacts, purposes: Container[str]) -> Integers:
    """Collectives of steady steps that are for one of these purposes, by start."""
    calls = collect_calls(one.trace, one.placing, None)
    sharded = shows_sharding(one, calls)
    wanted = [find_purpose(what, phase, sharded) in purposes for what, phase in zip(calls.whats, calls.phase)]
    rows: Integers = calls.rows[np.array(wanted, bool)]
    return one.in_steady_steps(rows)


def find_purpose(what: What, phase: str, sharded: bool | None) -> str:
    """What a collective is for, by its group, kind, numbers and phase.

    sharded: the trace shows that weights are gathered.
    """
    dimension = find_dimension(what.group.description)
    if what.kind in ("dispatch", "combine") or dimension == "expert":
        return EXPERTS
    if "tensor" in dimension:
        return TENSOR
    if dimension == "context":
        return CONTEXT
    if what.kind == "all_to_all":
        return ALL_TO_ALL
    if what.kind in POINT_TO_POINT or "pipeline" in dimension:
        return STAGES
    if phase == Phase.OPTIMIZER_STEP.value:
        return OPTIMIZER
    if what.kind == "all_gather":
        if is_of_weights(what.dtype, sharded):
            return WEIGHTS
        return OBJECTS if is_of_whole_numbers(what.dtype) else VALUES
    if what.kind in ("all_reduce", "reduce_scatter") and phase in _OF_GRADIENTS:
        return GRADIENTS
    if what.kind == "reduce_scatter":
        return GRADIENTS
    return FORWARD if what.kind == "all_reduce" and phase == Phase.FORWARD.value else REST


def is_of_weights(dtype: str, sharded: bool | None) -> bool:
    """Can a gather of such numbers be of weights? Whole numbers are none. Bytes are pickled objects, as
    all_gather_object has them, except where weights of several formats are sharded. sharded: None for unknown."""
    plain = _squash(dtype)
    if plain in _WHOLE_NUMBERS or sharded is False:
        return False
    return plain not in _BYTES or bool(sharded)


def is_of_whole_numbers(dtype: str) -> bool:
    """Whether these are whole numbers or bytes, as of pickled objects, counts and labels."""
    return _squash(dtype) in (*_WHOLE_NUMBERS, *_BYTES)


def _squash(dtype: str) -> str:
    return "".join(letter for letter in dtype.lower() if letter.isalnum())


def shows_sharding(one: RankFacts, calls: Calls | None = None) -> bool | None:
    """Whether ranks shard weights, by the names in the trace, else by what happens to gradients.

    Who shards weights scatters gradients, or gathers as many weights as gradients are summed. Where gradients are
    summed as a whole, and much less is gathered, each rank holds whole weights, and what it gathers is something else.

    Args:
        one: the rank.
        calls: its collectives; None: they are collected here.

    Returns:
        None where the trace does not say.
    """
    named = is_fully_sharded(one.trace)
    if named is not None:
        return named
    calls = collect_calls(one.trace, one.placing, None) if calls is None else calls
    sums_bytes: dict[str, float] = defaultdict(float)
    for at in np.flatnonzero(one.placing.counts[calls.rows]).tolist() if len(calls) else ():
        what = calls.whats[at]
        is_sum = what.kind == "all_reduce"
        in_backward = calls.phase[at] in _OF_GRADIENTS
        if is_sum and not in_backward and calls.phase[at] == Phase.FORWARD.value:
            return None  # layers are split, and their sums come in backward, too
        if not is_sum or (in_backward and find_dimension(what.group.description) in ("", "data")):
            sums_bytes[what.kind] += math.nan if what.num_bytes is None else what.num_bytes
    if "all_reduce" not in sums_bytes:
        return None
    # ZeRO-1 may sum whole gradients and gather as many weights
    gathered_bytes = sums_bytes.get("all_gather", 0.0)
    is_whole = MANY_SUMS * gathered_bytes <= sums_bytes["all_reduce"]
    return False if is_whole else None


def _find_shared_streams(one: RankFacts, calls: Calls) -> Flags:
    """[c]: does a call run on a stream that computes? It waits there for what was launched before it,
    and what follows waits for it."""
    events = one.trace.events
    kernels = one.trace.rows[Kind.KERNEL]
    computing = kernels[~np.isin(kernels, calls.rows)]
    if not len(computing):
        return np.zeros(len(calls), bool)
    streams, place = np.unique(events.stream[computing], return_inverse=True)
    length = np.bincount(place, events.end_ns[computing] - events.start_ns[computing])
    main = streams[length >= MIN_COMPUTE_SHARE * length.sum()]
    return np.asarray(np.isin(events.stream[calls.rows], main))


def _surround_attention(one: RankFacts, calls: Calls, rows: Integers) -> bool:
    """Whether all-to-alls stand directly before and behind attention: then they swap sequences for heads (Ulysses)."""
    names = one.trace.events.name
    kernels = one.compute_rows()
    kernels = kernels[np.argsort(one.trace.events.start_ns[kernels], kind="stable")]
    if not len(kernels):
        return False
    distinct, place = np.unique(names[kernels], return_inverse=True)
    is_attention = np.array([get_kernel_role(one.trace.names[name]) is Role.ATTENTION for name in distinct.tolist()])
    attends = np.concatenate((is_attention[place], [False]))
    start_ns = one.trace.events.start_ns[kernels]
    following = np.searchsorted(start_ns, calls.end_ns[rows])
    before = np.searchsorted(start_ns, calls.start_ns[rows]) - 1
    return bool((attends[following] | attends[before]).mean() >= MOSTLY_ATTENTION)


def _describe(one: RankFacts, calls: Calls, rows: Integers, exposed: Cover, purpose: str, shared: Flags) -> Exposed:
    steps = one.steady_steps
    each = exposed.within(calls.start_ns[rows], calls.end_ns[rows])
    kinds: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for at, ns in zip(rows.tolist(), each.tolist()):
        kinds[calls.whats[at].kind] += ns
        phases[calls.phase[at]] += ns
        kernels[one.trace.name_of(calls.rows[at])] += ns
    [(kernel, _)] = kernels.most_common(1)
    return Exposed(
        purpose=purpose,
        ms=exposed.length / 1e6 / steps,
        calls=len(rows) / steps,
        kinds=tuple(kind for kind, _ in kinds.most_common() if kind != OTHER),
        phases=tuple(phase for phase, _ in phases.most_common()),
        kernel=short_name(kernel),
        on_compute_stream_ms=float(each[shared[rows]].sum()) / 1e6 / steps,
        row=int(calls.rows[rows[int(each.argmax())]]),
    )
