"""What each piece of memory is for, from where it was allocated and when it was given back. Works on anybody's
snapshot: tags and annotations only make the phases surer.

A weight is made before the first step and stays; its gradient comes in backward, and outlives it or is added to
another; an optimizer's state comes in optimizer.step and stays; an activation comes in forward and waits for backward;
what does not outlive its phase is workspace.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.memory.phases import NOT_SAID, NUMBER, RECOMPUTE, SETUP, UNKNOWN, ZERO_GRAD, Phases
from megatron_lite.analysis.memory.record import ALLOC, FREE, FREE_REQUESTED, AllocatorEvents
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.formats.caching_allocator import MIN_BLOCK
from megatron_lite.formats.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_SINCE_HOPPER
from megatron_lite.formats.memory_categories import CATEGORIES

INDEX = {name: number for number, name in enumerate(CATEGORIES)}
UNDECIDED = -1
Ints = NDArray[np.int64]
MIN_LOGITS = 2**16  # bytes; below it a size says nothing about what it is

# --- when each piece of memory was handed out and given back, and what is known of it


@dataclass(frozen=True)
class Lives:
    """m allocations, in order of `begin`. A life's memory is held after event e where begin <= e < end."""

    begin: NDArray[
        np.int64
    ]  # [m], event of the allocation; -1: before the record. Of what awaits its free: of that request
    end: NDArray[np.int64]  # [m], event of the free, or of the request for it; n: alive at the end of the record
    returned: NDArray[
        np.int64
    ]  # [m], event after which the memory serves others: `end`, or later if it awaits its free
    awaiting: Flags  # [m], the part of a life after the program gave the memory back, while another stream may use it
    requested: NDArray[np.int64]  # [m], bytes asked for
    num_bytes: NDArray[np.int64]  # [m], as the allocator rounds them
    address: NDArray[np.int64]  # [m]
    stack: NDArray[np.int64]  # [m], of the allocation, index into Record.stacks; 0: unknown or empty
    tag: NDArray[np.int64]  # [m], the same for Record.tags
    stream: NDArray[np.int64]  # [m]
    pool: NDArray[np.int64]  # [m], index into Record.pools
    holds: NDArray[np.int64]  # [m], index into CATEGORIES of what a library's frame says; UNDECIDED: nothing
    code: NDArray[np.int64]  # [m], Code of the stack
    phase: NDArray[np.int64]  # [m], of the allocation
    freed_in: NDArray[np.int64]  # [m], phase of the free; NOT_SAID if none
    same_span: Flags  # [m], given back before its phase was over
    same_fine_span: Flags  # [m], the same where recomputation is a phase of its own
    unfinished: Flags  # [m], neither it nor its phase ends in the record
    outlives_step: Flags  # [m]
    known: Flags  # [m], a stack, a tag or an event says where it comes from

    def __len__(self) -> int:
        return len(self.begin)

    def held_after(self, event: int) -> Integers:
        """Rows of what is held after that event."""
        return np.flatnonzero((self.begin <= event) & (self.end > event))

    def has(self, code: Code) -> Flags:
        return (self.code & int(code)) > 0

    def within(self, *phases: str) -> Flags:
        return np.isin(self.phase, [NUMBER[phase] for phase in phases])

    def sum_held(self, n: int, weights: Integers | None = None) -> Integers:
        """int64 [n + 1]: bytes held before the first event, then after each.

        weights: of each life, else its num_bytes.
        """
        sizes = self.num_bytes if weights is None else weights
        change = np.zeros(n + 2, np.int64)
        np.add.at(change, self.begin + 1, sizes)
        np.subtract.at(change, np.minimum(self.end, n) + 1, sizes)
        return np.cumsum(change)[: n + 1]


@dataclass(frozen=True)
class _Spans:
    """When each piece of memory was held, and where the record knows it from; in order of `begin`."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    returned: NDArray[np.int64]
    awaiting: Flags
    columns: dict[str, NDArray[np.int64]]  # address, requested, stack, tag, stream, pool


def _join_events(record: AllocatorEvents) -> _Spans:
    """Allocations are joined with the next free of the same address. What has no allocation was there before; what has
    no free is there at the end, and where the blocks at the end know nothing of it, it stays all the same."""
    n, blocks = len(record), record.blocks
    freeing = FREE if np.any(record.action == FREE) else FREE_REQUESTED
    rows = np.flatnonzero((record.action == ALLOC) | (record.action == freeing))
    rows = rows[np.argsort(record.address[rows], kind="stable")]
    address, is_alloc = record.address[rows], record.action[rows] == ALLOC
    freed = is_alloc[:-1] & ~is_alloc[1:] & (address[1:] == address[:-1])  # an allocation followed by its own free
    ends = np.full(len(rows), n)
    ends[:-1][freed] = rows[1:][freed]
    begins, ends = rows[is_alloc], ends[is_alloc]
    stray = rows[~is_alloc & ~np.append(False, freed)[: len(rows)]]  # frees of what was there before
    live = np.flatnonzero(blocks["live"])
    old = blocks[live[~np.isin(blocks["address"][live], record.address[begins[ends == n]])]]
    begin = np.concatenate([begins, np.full(len(stray) + len(old), -1)])
    end = np.concatenate([ends, stray, np.full(len(old), n)])
    columns = _collect_columns(record, begins, stray, old)
    order = np.argsort(begin, kind="stable")
    return _split_awaiting(record, begin[order], end[order], {name: values[order] for name, values in columns.items()})


def _collect_columns(
    record: AllocatorEvents, begins: Integers, stray: Integers, old: NDArray[np.void]
) -> dict[str, Ints]:
    """What is known of allocations, of frees of what was there before, and of blocks at the end,
    one after the other."""
    of_events: dict[str, Integers] = {
        "address": record.address,
        "requested": record.size,
        "stack": record.stack,
        "tag": record.tag,
        "stream": record.stream,
        "pool": record.pool,
    }
    found = {}
    for name, values in of_events.items():
        # a free has the stack of who gave the memory back, not of who asked for it
        of_stray = values[stray] if name not in ("stack", "tag") else np.zeros(len(stray), np.int64)
        found[name] = np.concatenate([values[begins], of_stray, old[name]]).astype(np.int64)
    return found


def _find_requests(record: AllocatorEvents, begin: Ints, end: Ints, address: Ints) -> Ints:
    """int64 [m]: the event at which the free of each piece was requested; n + 1 where the record does not say."""
    n = len(record)
    requests = np.flatnonzero(record.action == FREE_REQUESTED)
    if not len(requests) or not np.any(record.action == FREE):
        return np.full(len(begin), n + 1)
    # the last request for the same address before the end
    width = n + 2
    _, code = np.unique(np.concatenate([record.address[requests], address]), return_inverse=True)
    of_request, of_piece = code[: len(requests)], code[len(requests) :]
    keys = np.sort(of_request * width + requests)
    at = np.searchsorted(keys, of_piece * width + np.minimum(end, n)) - 1
    same = (at >= 0) & (keys[at] // width == of_piece)
    found = np.where(same, keys[at] % width, n + 1)
    return np.where(found > begin, found, n + 1)


def _split_awaiting(record: AllocatorEvents, begin: Ints, end: Ints, columns: dict[str, Ints]) -> _Spans:
    """Memory that the program gave back while another stream may use it (Tensor.record_stream) is two lives: until the
    request, and until the allocator may hand it out again. Ordinarily the one follows the other at once."""
    n, address = len(record), columns["address"]
    requested_at = _find_requests(record, begin, end, address)
    late = requested_at < np.where(end >= n, n, end - 1)
    # and what awaits its free at the end without a request in the record
    blocks = record.blocks
    waiting = np.isin(address, blocks["address"][blocks["awaiting"]]) & (end >= n) & ~late
    rows = np.flatnonzero(late)
    returned = np.concatenate([end, end[rows]])
    awaiting = np.concatenate([waiting, np.ones(len(rows), bool)])
    new_end = np.concatenate([np.where(late, requested_at, end), end[rows]])
    new_begin = np.concatenate([begin, requested_at[rows]])
    order = np.argsort(new_begin, kind="stable")
    joined = {name: np.concatenate([values, values[rows]])[order] for name, values in columns.items()}
    return _Spans(new_begin[order], new_end[order], returned[order], awaiting[order], joined)


def find_lifetimes(record: AllocatorEvents, phases: Phases) -> Lives:
    """The pieces of memory of a record, with the phases in which they were handed out and given back."""
    n = len(record)
    spans = _join_events(record)
    begin = spans.begin
    end = spans.end
    columns = spans.columns
    stack = columns["stack"]
    tag = columns["tag"]
    is_old = begin < 0
    kept = end >= n
    phase = _guess_phases_before_record(phases, stack, tag)
    freed_in = np.full(len(begin), NOT_SAID)
    unfinished = np.zeros(len(begin), bool)
    if n:
        first = np.maximum(begin, 0)
        last = np.minimum(end, n - 1)
        phase = np.where(is_old, phase, phases.of_event[first])
        freed_in = np.where(kept, NOT_SAID, phases.of_event[last])
        unfinished = ~is_old & kept & (phases.span[first] == phases.span[-1])
    step_ends = np.array([step.last for step in phases.steps], np.int64)
    holds = [INDEX[known.row.holds] if known else UNDECIDED for known in record.stacks.known]
    return Lives(
        begin=begin,
        end=end,
        returned=spans.returned,
        awaiting=spans.awaiting,
        requested=columns["requested"],
        num_bytes=np.maximum(-(-columns["requested"] // MIN_BLOCK), 1) * MIN_BLOCK,
        address=columns["address"],
        stack=stack,
        tag=tag,
        stream=columns["stream"],
        pool=columns["pool"],
        holds=np.array(holds, np.int64)[stack],
        code=record.stacks.codes[0][stack],
        phase=np.where(spans.awaiting, NOT_SAID, phase),
        freed_in=freed_in,
        same_span=_ends_in_its_span(begin, end, phases.span),
        same_fine_span=_ends_in_its_span(begin, end, phases.fine_span),
        unfinished=unfinished,
        outlives_step=np.searchsorted(step_ends, begin) < np.searchsorted(step_ends, end),
        known=~is_old | (stack > 0) | (tag > 0),
    )


def _guess_phases_before_record(phases: Phases, stack: Ints, tag: Ints) -> Integers:
    """int64 [m]: the phase of what was there before the record: by its tag, else by its stack."""
    by_tag = phases.of_tag[tag]
    by_stack = phases.of_stack[stack]
    # code without a name made it before training began
    by_stack = np.where(np.isin(by_stack, (NOT_SAID, NUMBER[UNKNOWN])), NUMBER[SETUP], by_stack)
    by_stack = np.where(stack > 0, by_stack, NUMBER[UNKNOWN])
    return np.where(by_tag == NOT_SAID, by_stack, by_tag)


def _ends_in_its_span(begin: Ints, end: Ints, span: NDArray[np.int64]) -> Flags:
    """bool [m]: the life begins and ends within the record, in one span of it. span: of each event."""
    n = len(span)
    if not n:
        return np.zeros(len(begin), bool)
    first = np.maximum(begin, 0)
    last = np.minimum(end, n - 1)
    inside: Flags = (begin >= 0) & (end < n) & (span[first] == span[last])
    return inside


# --- the rules; the first that holds decides


class _Decisions:
    """The category of each life as far as it is decided. What one rule decided, no later one changes."""

    def __init__(self, lives: Lives):
        self.found = np.full(len(lives), UNDECIDED)  # [m], indices into CATEGORIES
        self.lives = lives

    def decide(self, category: str, where: Flags) -> None:
        self.found[where & (self.found == UNDECIDED)] = INDEX[category]

    def has_size_of(self, *categories: str) -> Flags:
        """bool [m]: the life has the size of one that is decided to be of these categories."""
        of_categories = np.isin(self.found, [INDEX[category] for category in categories])
        return np.isin(self.lives.requested, self.lives.requested[of_categories])


def assign_categories(lives: Lives, phases: Phases) -> Integers:
    """int64 [m]: an index into CATEGORIES for each life."""
    decisions = _Decisions(lives)
    logits = lives.has(Code.LOSS) | _find_logits(lives, phases)
    _decide_by_code(decisions)
    _decide_setup_and_update(decisions)
    _decide_backward(decisions, logits)
    _decide_forward(decisions, logits)
    decisions.decide("other", lives.known)
    _assign_by_size(lives, decisions.found)
    _move_added_gradients(decisions)
    _decide_workspaces_since_hopper(decisions)
    decisions.decide("before the record", decisions.found == UNDECIDED)
    return decisions.found


def _decide_by_code(decisions: _Decisions) -> None:
    """Decide what the allocator's state or the allocating code says, whatever the phase."""
    lives = decisions.lives
    decisions.decide("awaiting free", lives.awaiting)
    named = lives.known & (lives.holds != UNDECIDED) & (decisions.found == UNDECIDED)
    decisions.found[named] = lives.holds[named]
    # Hopper's has a size that weights have too
    decisions.decide("workspace", _came_unseen(lives) & (lives.requested == CUBLAS_WORKSPACE))
    decisions.decide("workspace", lives.known & lives.has(Code.WORKSPACE))
    communicates = lives.has(Code.COMMUNICATION) & ~lives.has(Code.GRADIENT_BUFFER)
    decisions.decide("communication", lives.known & communicates)


def _came_unseen(lives: Lives) -> Flags:
    """bool [m]: it was there before the record, and nothing says where it comes from."""
    return ~lives.known & (lives.begin < 0)


def _decide_setup_and_update(decisions: _Decisions) -> None:
    """Decide what was made before training began, and by the optimizer and what belongs to it."""
    lives = decisions.lives
    setup = lives.known & lives.within(SETUP)
    decisions.decide("gradients", setup & lives.has(Code.GRADIENT_BUFFER))
    decisions.decide("master weights", setup & lives.has(Code.MASTER))
    decisions.decide("moments", setup & lives.has(Code.OPTIMIZER))
    decisions.decide("other", setup & lives.has(Code.LOADER))
    decisions.decide("workspace", setup & lives.same_span)
    decisions.decide("parameters", setup)
    stepping = lives.known & lives.within("optimizer_step")
    decisions.decide("workspace", stepping & lives.same_span)
    decisions.decide("master weights", stepping & lives.has(Code.MASTER))
    decisions.decide("moments", stepping)
    decisions.decide("workspace", lives.within("clip_grad", ZERO_GRAD) & lives.same_span)
    # copies in the optimizer's precision
    decisions.decide("gradients", lives.within("unscale"))
    decisions.decide("communication", lives.within("grad_sync"))


def _decide_backward(decisions: _Decisions, logits: Flags) -> None:
    """Decide what was made in backward, and in the recomputation within it. logits: of forward and backward."""
    lives = decisions.lives
    loss = lives.has(Code.LOSS)
    backward = lives.within("backward")
    recomputed = lives.within(RECOMPUTE)
    # gradients outlive their backward; in one that did not end, only a weight's size tells
    outliving = backward & lives.known & ~lives.same_span
    of_weights = ~loss | decisions.has_size_of("parameters")
    decisions.decide("gradients", outliving & ~lives.unfinished & of_weights)
    of_weights = ~loss & decisions.has_size_of("parameters", "gradients")
    decisions.decide("gradients", outliving & lives.unfinished & of_weights)
    decisions.decide("logits and loss", (backward | recomputed) & logits)
    decisions.decide("workspace", (backward & lives.known) | (recomputed & lives.same_fine_span))
    decisions.decide("activations", recomputed)


def _decide_forward(decisions: _Decisions, logits: Flags) -> None:
    """Decide what was made in forward. logits: of forward and backward."""
    lives = decisions.lives
    forward = lives.known & lives.within("forward")
    decisions.decide("logits and loss", forward & logits)
    decisions.decide("workspace", forward & lives.same_span)
    # kept on purpose, or by mistake
    decisions.decide("other", forward & lives.outlives_step & (lives.freed_in == NOT_SAID))
    decisions.decide("activations", forward)


def _move_added_gradients(decisions: _Decisions) -> None:
    """Move gradients that are added to others from workspace and logits to gradients.

    They have a weight's size, and are the gradient of no activation or logits of that size. A logits' gradient was told
    from others by its place already.
    """
    lives = decisions.lives
    found = decisions.found
    of_loss = found == INDEX["logits and loss"]
    of_activations = lives.requested[found == INDEX["activations"]]
    within_backward = lives.within("backward") & lives.known & lives.same_span
    passing = within_backward & decisions.has_size_of("parameters")
    own_size = (found == INDEX["workspace"]) & ~np.isin(lives.requested, of_activations)
    forward_sizes = np.union1d(of_activations, lives.requested[of_loss & lives.within("forward")])
    no_logits = lives.has(Code.WEIGHT_GRADIENT) | ~np.isin(lives.requested, forward_sizes)
    found[passing & (own_size | (of_loss & no_logits))] = INDEX["gradients"]


def _decide_workspaces_since_hopper(decisions: _Decisions) -> None:
    """Decide what has the size of cuBLAS' workspace on Hopper,
    if there are as few as there are threads that have one."""
    undecided = (decisions.found == UNDECIDED) & _came_unseen(decisions.lives)
    sized = undecided & (decisions.lives.requested == CUBLAS_WORKSPACE_SINCE_HOPPER)
    # more are weights of the same size
    if sized.sum() <= CUBLAS_THREADS:
        decisions.decide("workspace", sized)


def _find_logits(lives: Lives, phases: Phases) -> Flags:
    """bool [m]: the logits come from an ordinary layer and go to one in backward. They have the size of what the loss
    handles, and in forward a stack that comes once, where layers repeat; in backward they come before all else."""
    recorded = (lives.begin >= 0) & ~lives.awaiting
    found = np.zeros(len(lives), bool)
    loss = lives.has(Code.LOSS) & lives.within("forward", "backward") & (lives.requested >= MIN_LOGITS)
    sized = np.isin(lives.requested, lives.requested[loss]) & recorded
    forward = np.flatnonzero(lives.within("forward") & recorded)
    stacks = int(lives.stack.max(initial=0)) + 1
    stack_in_span = phases.fine_span[lives.begin[forward]] * stacks + lives.stack[forward]
    _, where, times = np.unique(stack_in_span, return_inverse=True, return_counts=True)
    found[forward] = sized[forward] & (times[where] == 1)
    # of a small model all that a layer makes may have that size: what comes between may be smaller
    least = min(MIN_LOGITS, int(lives.requested[loss].max(initial=0)) // 8)
    computed = lives.within("backward") & ~lives.has(Code.RECOMPUTE) & recorded
    backward = np.flatnonzero(computed & (lives.requested >= least))
    span = phases.span[lives.begin[backward]]
    first_other = np.full(int(phases.span.max(initial=0)) + 1, np.iinfo(np.int64).max)
    others = ~sized[backward]
    np.minimum.at(first_other, span[others], lives.begin[backward[others]])
    found[backward] = sized[backward] & (lives.begin[backward] < first_other[span])
    return found


# --- memory without stack or tag that was there before the record: told apart by counting equal sizes
#
# Each gradient has one weight of its size, and an optimizer's state and masters come in whole sets of such sizes. The
# set that explains the most bytes is taken; what it does not explain stays unknown.

MAX_UNEXPLAINED = 0.5  # of the candidates' bytes; beyond it the sizes do not fit and nothing is claimed


@dataclass(frozen=True)
class _OptimizerState:
    """What an optimizer keeps for each weight."""

    masters: int  # how many
    moments: int  # how many
    times_gradient: int  # bytes of each of them by those of the weight's gradient; 2 is fp32 beside 16-bit weights


HYPOTHESES = (
    _OptimizerState(masters=0, moments=0, times_gradient=1),
    _OptimizerState(masters=0, moments=1, times_gradient=1),
    _OptimizerState(masters=0, moments=2, times_gradient=1),
    _OptimizerState(masters=1, moments=2, times_gradient=2),
    _OptimizerState(masters=1, moments=1, times_gradient=2),
    _OptimizerState(masters=0, moments=2, times_gradient=2),
)


def _assign_by_size(lives: Lives, found: Integers) -> None:
    """Write into `found` (indices of categories;
    negative where undecided) what sizes tell of what came before the record."""
    rows = np.flatnonzero((found < 0) & (lives.begin < 0))
    gradients = np.flatnonzero(found == INDEX["gradients"])
    if not len(rows) or not len(gradients):
        return
    of_gradients = _count_sizes_at_peak(lives, gradients)
    _assign_by_end(lives, found, rows, of_gradients)
    staying = rows[lives.freed_in[rows] == NOT_SAID]
    state = _choose_optimizer_state(lives.requested[staying], of_gradients)
    if state:
        _assign_sets(lives, found, staying, of_gradients, state)


def _count_sizes_at_peak(lives: Lives, rows: Integers) -> Counter[int]:
    """{size: how many} of the lives `rows` that were alive together when most of them were."""
    begins = lives.begin[rows]
    ends = np.sort(lives.end[rows])
    alive = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    moment = begins[np.argmax(alive)]
    together = rows[(begins <= moment) & (lives.end[rows] > moment)]
    return Counter(lives.requested[together].tolist())


def _assign_by_end(lives: Lives, found: Integers, rows: Integers, of_gradients: Counter[int]) -> None:
    """Write into `found` what the phase in which it was given back tells, besides the size, of the lives `rows`."""
    freed_in = lives.freed_in[rows]
    requested = lives.requested[rows]
    of_moments = np.isin(requested, lives.requested[found == INDEX["moments"]])
    found[rows[(freed_in == NUMBER["optimizer_step"]) & of_moments]] = INDEX["moments"]
    cleared = np.isin(freed_in, [NUMBER[name] for name in (ZERO_GRAD, "forward", "data", "data_to_device", UNKNOWN)])
    found[rows[cleared & np.isin(requested, list(of_gradients))]] = INDEX["gradients"]


def _choose_optimizer_state(sizes: Integers, of_gradients: Counter[int]) -> _OptimizerState | None:
    """The state of an optimizer that explains most of the memory that stays; None if none explains enough.

    Args:
        sizes: bytes of each piece that stays.
        of_gradients: how many gradients there are of each size, and so how many weights.
    """
    have = Counter(sizes.tolist())

    def count_unexplained(state: _OptimizerState) -> int:
        """Bytes by which what should be there and what is there differ."""
        expected: Counter[int] = Counter()
        for size, count in of_gradients.items():
            expected[size] += count
            expected[size * state.times_gradient] += (state.masters + state.moments) * count
        return sum(abs(have[size] - expected[size]) * size for size in set(have) | set(expected))

    best = min(HYPOTHESES, key=count_unexplained)
    total_bytes = sum(size * count for size, count in have.items())
    if not have or count_unexplained(best) > MAX_UNEXPLAINED * total_bytes:
        return None
    return best


def _assign_sets(
    lives: Lives, found: Integers, staying: Integers, of_gradients: Counter[int], state: _OptimizerState
) -> None:
    """Write into `found` which of the lives `staying` are weights and the optimizer's state,
    in the order of addresses."""
    rows_of_size: dict[int, list[int]] = defaultdict(list)
    for row in staying[np.argsort(lives.address[staying], kind="stable")].tolist():
        rows_of_size[int(lives.requested[row])].append(row)

    def assign(category: str, times: int, times_gradient: int) -> None:
        for size, count in of_gradients.items():
            rows = rows_of_size[size * times_gradient]
            found[rows[: times * count]] = INDEX[category]
            del rows[: times * count]

    assign("parameters", 1, 1)
    assign("master weights", state.masters, state.times_gradient)
    assign("moments", state.moments, state.times_gradient)
