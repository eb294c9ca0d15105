"""Communication of one rank that no compute runs beside, by what it is for. Each moment counts once."""

import enum
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
from megatron_lite.analysis.ranks.rank_results import OTHER_KIND
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.mesh_axes import find_dimension
from megatron_lite.phases import Phase

MANY_SUMS = 2  # times the bytes that are gathered
_OF_GRADIENTS = (Phase.BACKWARD.value, Phase.GRAD_SYNC.value)
MOSTLY_ATTENTION = 0.5  # of all-to-alls that attention must come before or behind
MIN_COMPUTE_SHARE = 0.1  # of all compute that a stream must run to be one that computes
# numbers of samples, tokens, sizes: torch's and NCCL's spellings of whole numbers, squashed
_WHOLE_NUMBERS = ("long", "longint", "int", "int64", "int32", "short", "shortint", "bool", "char", "signedchar", "int8")
_BYTES = ("byte", "unsignedchar", "uint8")


class Purpose(str, enum.Enum):
    """Names of what collectives are for; of several under way at once, the first one here is charged."""

    EXPERTS = "experts"  # of tokens among experts, by a library's names or the group's
    ALL_TO_ALL = "all-to-all"  # of tokens, sequences or rows of embedding tables: the trace does not say
    TENSOR = "tensor"  # among ranks that split layers
    CONTEXT = "context"  # among ranks that split sequences
    FORWARD = "forward"  # a sum in forward of a group without a name
    STAGES = "stages"  # from one rank to another
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # inside the optimizer's step
    OBJECTS = "objects"  # of pickled Python objects and whole numbers
    VALUES = "values"  # gathers of features, statistics or metrics: ranks hold whole weights
    REST = "rest"


@dataclass(frozen=True)
class Exposed:
    """Communication for one purpose; means per steady step."""

    purpose: Purpose
    ms: float  # while nothing computes
    calls: float
    kinds: tuple[str, ...]  # "dispatch", "all_reduce"; most exposed first
    phases: tuple[str, ...]  # most exposed first; "" for unknown
    kernel: str  # the most exposed one's name
    on_compute_stream_ms: float  # of ms, on a stream that computes: it cannot overlap
    row: int  # the longest event


def measure_exposed(one: RankFacts, world_size: int | None) -> tuple[Exposed, ...]:
    """Measure the communication of a rank's steady steps that no compute runs beside, by purpose.

    Args:
        one: the rank.
        world_size: how many ranks take part where the trace does not say; None if unknown.

    Returns:
        The most exposed purpose first; () without collectives in steady steps.
    """
    calls = collect_calls(one.trace, one.placing, world_size)
    purposes = _sort_by_purpose(one, calls)
    if not purposes:
        return ()
    shared = _find_shared_streams(one, calls)
    taken: Cover = calls.compute
    found = []
    for purpose in Purpose:
        rows = np.array(purposes.get(purpose, []), np.int64)
        if not len(rows):
            continue
        under_way = union(calls.start_ns[rows], calls.end_ns[rows])
        exposed = difference(under_way, taken)
        taken = joined(taken, exposed)
        found.append(_describe(one, calls, rows, exposed, purpose, shared))
    return tuple(sorted(found, key=lambda part: -part.ms))


def _sort_by_purpose(one: RankFacts, calls: Calls) -> dict[Purpose, list[int]]:
    """Sort the calls of steady steps by what they are for; indices into `calls`."""
    if not len(calls):
        return {}
    sharded = shows_sharding(one, calls)
    purposes: dict[Purpose, list[int]] = defaultdict(list)
    for at in np.flatnonzero(one.placing.counts[calls.rows]).tolist():
        purpose = find_purpose(calls.whats[at], calls.phase[at], sharded)
        purposes[purpose].append(at)
    if Purpose.ALL_TO_ALL in purposes:
        exchanges = np.array(purposes[Purpose.ALL_TO_ALL], np.int64)
        if _surround_attention(one, calls, exchanges):
            purposes[Purpose.CONTEXT] += purposes.pop(Purpose.ALL_TO_ALL)
    return purposes


def find_rows_for(one: RankFacts, purposes: Container[Purpose]) -> Integers:
    """Collectives of steady steps that are for one of these purposes, by start."""
    calls = collect_calls(one.trace, one.placing, None)
    sharded = shows_sharding(one, calls)
    wanted = []
    for what, phase in zip(calls.whats, calls.phase):
        purpose = find_purpose(what, phase, sharded)
        wanted.append(purpose in purposes)
    rows: Integers = calls.rows[np.array(wanted, bool)]
    return one.in_steady_steps(rows)


def find_purpose(what: What, phase: str, sharded: bool | None) -> Purpose:
    """Find what a collective is for, by its group, kind, numbers and phase.

    Args:
        what: the collective.
        phase: in which it was called; "" for unknown.
        sharded: whether ranks shard weights, which they then gather; None where the trace does not say.

    Returns:
        Its purpose.
    """
    kind = what.kind
    dimension = find_dimension(what.group.description)
    if kind in ("dispatch", "combine") or dimension == "expert":
        return Purpose.EXPERTS
    if "tensor" in dimension:
        return Purpose.TENSOR
    if dimension == "context":
        return Purpose.CONTEXT
    if kind == "all_to_all":
        return Purpose.ALL_TO_ALL
    if kind in POINT_TO_POINT or "pipeline" in dimension:
        return Purpose.STAGES
    if phase == Phase.OPTIMIZER_STEP.value:
        return Purpose.OPTIMIZER
    if kind == "all_gather":
        if is_of_weights(what.dtype, sharded):
            return Purpose.WEIGHTS
        if is_of_whole_numbers(what.dtype):
            return Purpose.OBJECTS
        return Purpose.VALUES
    if kind == "reduce_scatter":
        return Purpose.GRADIENTS
    if kind == "all_reduce" and phase in _OF_GRADIENTS:
        return Purpose.GRADIENTS
    if kind == "all_reduce" and phase == Phase.FORWARD.value:
        return Purpose.FORWARD
    return Purpose.REST


def is_of_weights(dtype: str, sharded: bool | None) -> bool:
    """Tell whether a gather of such numbers can be of weights.

    Whole numbers are no weights. Bytes are pickled objects, as all_gather_object has them, except where weights of
    several formats are sharded.

    Args:
        dtype: the numbers' type.
        sharded: whether ranks shard weights; None for unknown.
    """
    if sharded is False:
        return False
    plain = _squash(dtype)
    if plain in _BYTES:
        return bool(sharded)
    return plain not in _WHOLE_NUMBERS


def is_of_whole_numbers(dtype: str) -> bool:
    """Whether these are whole numbers or bytes, as of pickled objects, counts and labels."""
    return _squash(dtype) in (*_WHOLE_NUMBERS, *_BYTES)


def _squash(dtype: str) -> str:
    """Reduce the name of a type to its letters and digits, in lower case."""
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
    if calls is None:
        calls = collect_calls(one.trace, one.placing, None)
    if not len(calls):
        return None
    sums_bytes: dict[str, float] = defaultdict(float)
    for at in np.flatnonzero(one.placing.counts[calls.rows]).tolist():
        what = calls.whats[at]
        phase = calls.phase[at]
        if what.kind == "all_reduce" and phase == Phase.FORWARD.value:
            return None  # layers are split, and their sums come in backward, too
        if _counts_for_sharding(what, phase):
            num_bytes = math.nan if what.num_bytes is None else what.num_bytes
            sums_bytes[what.kind] += num_bytes
    if "all_reduce" not in sums_bytes:
        return None
    # ZeRO-1 may sum whole gradients and gather as many weights
    gathered_bytes = sums_bytes.get("all_gather", 0.0)
    is_whole = MANY_SUMS * gathered_bytes <= sums_bytes["all_reduce"]
    return False if is_whole else None


def _counts_for_sharding(what: What, phase: str) -> bool:
    """Whether a call tells if ranks shard weights: of sums only those of gradients do."""
    if what.kind != "all_reduce":
        return True
    dimension = find_dimension(what.group.description)
    return phase in _OF_GRADIENTS and dimension in ("", "data")


def _find_shared_streams(one: RankFacts, calls: Calls) -> Flags:
    """Find the calls that run on a stream that computes, bool [c].

    They wait there for what was launched before them, and what follows waits for them.
    """
    events = one.trace.events
    kernels = one.trace.rows[Kind.KERNEL]
    computing = kernels[~np.isin(kernels, calls.rows)]
    if not len(computing):
        return np.zeros(len(calls), bool)
    streams, place = np.unique(events.stream[computing], return_inverse=True)
    length_ns = events.end_ns[computing] - events.start_ns[computing]
    of_stream_ns = np.bincount(place, length_ns)
    least_ns = MIN_COMPUTE_SHARE * of_stream_ns.sum()
    main = streams[of_stream_ns >= least_ns]
    return np.asarray(np.isin(events.stream[calls.rows], main))


def _surround_attention(one: RankFacts, calls: Calls, rows: Integers) -> bool:
    """Whether all-to-alls stand directly before and behind attention: then they swap sequences for heads (Ulysses)."""
    events = one.trace.events
    kernels = one.compute_rows()
    if not len(kernels):
        return False
    in_order = np.argsort(events.start_ns[kernels], kind="stable")
    kernels = kernels[in_order]
    distinct, place = np.unique(events.name[kernels], return_inverse=True)
    roles = [get_kernel_role(one.trace.names[name]) for name in distinct.tolist()]
    is_attention = np.array([role is Role.ATTENTION for role in roles])
    # the last entry is for calls with no kernel before or behind them
    attends = np.concatenate((is_attention[place], [False]))
    start_ns = events.start_ns[kernels]
    following = np.searchsorted(start_ns, calls.end_ns[rows])
    before = np.searchsorted(start_ns, calls.start_ns[rows]) - 1
    is_beside = attends[following] | attends[before]
    return bool(is_beside.mean() >= MOSTLY_ATTENTION)


def _describe(one: RankFacts, calls: Calls, rows: Integers, exposed: Cover, purpose: Purpose, shared: Flags) -> Exposed:
    """Describe the communication for one purpose.

    Args:
        one: the rank.
        calls: its collectives.
        rows: [k], indices of those for the purpose.
        exposed: when they run and nothing computes.
        purpose: what they are for.
        shared: bool [c], the calls on a stream that computes.
    """
    steps = one.steady_steps
    each = exposed.within(calls.start_ns[rows], calls.end_ns[rows])
    kinds: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for at, ns in zip(rows.tolist(), each.tolist()):
        kind = calls.whats[at].kind
        kernel = one.trace.name_of(calls.rows[at])
        kinds[kind] += ns
        phases[calls.phase[at]] += ns
        kernels[kernel] += ns
    [(most_exposed, _)] = kernels.most_common(1)
    is_shared = shared[rows]
    on_compute_stream_ns = float(each[is_shared].sum())
    longest = rows[int(each.argmax())]
    return Exposed(
        purpose=purpose,
        ms=exposed.length / 1e6 / steps,
        calls=len(rows) / steps,
        kinds=tuple(kind for kind, _ in kinds.most_common() if kind != OTHER_KIND),
        phases=tuple(phase for phase, _ in phases.most_common()),
        kernel=short_name(most_exposed),
        on_compute_stream_ms=on_compute_stream_ns / 1e6 / steps,
        row=int(calls.rows[longest]),
    )
