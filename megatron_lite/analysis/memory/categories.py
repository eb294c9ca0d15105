"""What each piece of memory is for, from where it was allocated and when it was given back. Works on anybody's snapshot:
tags and annotations only make the phases surer.

A weight is made before the first step and stays; its gradient comes in backward, and outlives it or is added to another; an
optimizer's state comes in optimizer.step and stays; an activation comes in forward and waits for backward; what does not
outlive its phase is workspace.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.memory.phases import NOT_SAID, NUMBER, RECOMPUTE, SETUP, UNKNOWN, ZERO_GRAD, Phases
from megatron_lite.analysis.memory.record import ALLOC, FREE, FREE_REQUESTED, Record
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.estimate.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_SINCE_HOPPER
from megatron_lite.estimate.memory_categories import CATEGORIES

# --- when each piece of memory was handed out and given back


SMALLEST_BLOCK = (
    512  # bytes; CUDA's caching allocator rounds up to multiples (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
)


@dataclass(frozen=True)
class Lives:
    """m allocations, in order of `begin`. A life's memory is held after event e where begin <= e < end."""

    begin: np.ndarray  # int64 [m], event of the allocation; -1: before the record
    end: np.ndarray  # int64 [m], event of the free; n: alive at the end of the record
    requested: np.ndarray  # int64 [m], bytes asked for
    num_bytes: np.ndarray  # int64 [m], as the allocator rounds them
    address: np.ndarray  # int64 [m]
    stack: np.ndarray  # int32 [m], of the allocation, index into Record.stacks; 0: unknown or empty
    tag: np.ndarray  # int32 [m], the same for Record.tags
    stream: np.ndarray  # int64 [m]

    def __len__(self) -> int:
        return len(self.begin)

    def held_after(self, event: int) -> np.ndarray:
        """Rows of what is held after that event."""
        return np.flatnonzero((self.begin <= event) & (self.end > event))


def find_lifetimes(record: Record) -> Lives:
    """Allocations are joined with the next free of the same address. What has no allocation was there before; what has
    no free is there at the end, and where the blocks at the end know nothing of it, it stays all the same."""
    n, blocks = len(record), record.blocks
    freeing = FREE if np.any(record.action == FREE) else FREE_REQUESTED
    rows = np.flatnonzero((record.action == ALLOC) | (record.action == freeing))
    rows = rows[np.argsort(record.address[rows], kind="stable")]
    address, is_alloc = record.address[rows], record.action[rows] == ALLOC
    same = np.empty(len(rows), bool)
    same[-1:], same[:-1] = False, address[1:] == address[:-1]
    closed = is_alloc & same & ~np.append(is_alloc[1:], True)  # followed by its own free
    begins, ends = rows[is_alloc], np.full(len(rows), n)
    ends[closed] = rows[1:][closed[:-1]]
    ends = ends[is_alloc]
    paired = np.zeros(len(rows), bool)
    paired[1:] = closed[:-1]
    stray = rows[~is_alloc & ~paired]  # frees of what was there before
    live = np.flatnonzero(blocks.live)
    held = np.isin(blocks.address[live], record.address[begins[ends == n]])
    old = live[~held]
    requested = np.concatenate([record.size[begins], record.size[stray], blocks.requested[old]])
    begin = np.concatenate([begins, np.full(len(stray) + len(old), -1)])
    nothing = np.zeros(len(stray), np.int64)
    columns = {
        "begin": begin,
        "end": np.concatenate([ends, stray, np.full(len(old), n)]),
        "requested": requested,
        "num_bytes": np.maximum(-(-requested // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK,
        "address": np.concatenate([record.address[begins], record.address[stray], blocks.address[old]]),
        "stack": np.concatenate([record.stack[begins], nothing, blocks.stack[old]]),
        "tag": np.concatenate([record.tag[begins], nothing, blocks.tag[old]]),
        "stream": np.concatenate([record.stream[begins], record.stream[stray], blocks.stream[old]]),
    }
    order = np.argsort(begin, kind="stable")
    return Lives(**{name: column[order] for name, column in columns.items()})


def held_bytes(lives: Lives, n: int, weights: np.ndarray | None = None) -> np.ndarray:
    """int64 [n + 1]: bytes held before the first event, then after each. weights: of each life, else its num_bytes."""
    sizes = lives.num_bytes if weights is None else weights
    change = np.zeros(n + 2, np.int64)
    np.add.at(change, lives.begin + 1, sizes)
    np.subtract.at(change, np.minimum(lives.end, n) + 1, sizes)
    return np.cumsum(change)[: n + 1]


# --- memory without stack or tag that was there before the record: told apart by counting equal sizes
#
# Each gradient has one weight of its size, and an optimizer's state and masters come in whole sets of such sizes. The set that
# explains the most bytes is taken; what it does not explain stays unknown.

MAX_UNEXPLAINED = 0.5  # of the candidates' bytes; beyond it the sizes do not fit and nothing is claimed


@dataclass(frozen=True)
class Sets:
    """How many tensors of which kind go with each gradient. wide: states are fp32 beside 16-bit weights."""

    masters: int
    moments: int
    wide: bool

    @property
    def order(self) -> tuple[tuple[str, int, int], ...]:
        """(category, how many, times the gradient's size)."""
        factor = 2 if self.wide else 1
        return (("parameters", 1, 1), ("master weights", self.masters, factor), ("moments", self.moments, factor))


HYPOTHESES = (
    Sets(0, 0, False),
    Sets(0, 1, False),
    Sets(0, 2, False),
    Sets(1, 2, True),
    Sets(1, 1, True),
    Sets(0, 2, True),
)


def assign_unknown(lives: Lives, found: np.ndarray, freed_in: np.ndarray, index: dict[str, int]):
    """Writes into `found` (indices of categories; negative where undecided) what sizes tell."""
    open_rows = np.flatnonzero((found < 0) & (lives.begin < 0))
    gradients = _one_set(lives, np.flatnonzero(found == index["gradients"]))
    if not len(open_rows) or not gradients:
        return
    known_sizes = np.fromiter(gradients, np.int64)
    moments = lives.requested[found == index["moments"]]
    freed = freed_in[open_rows]
    replaced = (freed == NUMBER["optimizer_step"]) & np.isin(lives.requested[open_rows], moments)
    found[open_rows[replaced]] = index["moments"]
    cleared = np.isin(
        freed, [NUMBER[ZERO_GRAD], NUMBER["forward"], NUMBER["data"], NUMBER["data_to_device"], NUMBER[""]]
    )
    cleared &= np.isin(lives.requested[open_rows], known_sizes)
    found[open_rows[cleared]] = index["gradients"]
    staying = open_rows[freed == NOT_SAID]
    _by_count(lives, staying, found, gradients, index)


def _one_set(lives: Lives, gradients: np.ndarray) -> Counter:
    """{size: how many} of the gradients that were alive together when most were."""
    if not len(gradients):
        return Counter()
    begins, ends = lives.begin[gradients], np.sort(lives.end[gradients])
    alive = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    moment = begins[np.argmax(alive)]
    together = gradients[(begins <= moment) & (lives.end[gradients] > moment)]
    return Counter(lives.requested[together].tolist())


def _by_count(lives: Lives, staying: np.ndarray, found: np.ndarray, gradients: Counter, index: dict[str, int]):
    have = Counter(lives.requested[staying].tolist())
    total = sum(size * count for size, count in have.items())
    errors = [_unexplained(sets, have, gradients) for sets in HYPOTHESES]
    best = int(np.argmin(errors))
    if not total or errors[best] > MAX_UNEXPLAINED * total:
        return
    rows_of: dict[int, list[int]] = {}
    for row in staying[np.argsort(lives.address[staying], kind="stable")].tolist():
        rows_of.setdefault(int(lives.requested[row]), []).append(row)
    for category, times, factor in HYPOTHESES[best].order:
        for size, count in gradients.items():
            rows = rows_of.get(size * factor, [])
            found[rows[: times * count]] = index[category]
            del rows[: times * count]


def _unexplained(sets: Sets, have: Counter, gradients: Counter) -> int:
    """Bytes by which what should be there and what is there differ."""
    expected = Counter()
    for _, times, factor in sets.order:
        for size, count in gradients.items():
            expected[size * factor] += times * count
    return sum(abs(have[size] - expected[size]) * size for size in set(have) | set(expected))


# --- what each piece of memory is for, from where it was allocated and when it was given back. Works on anybody's snapshot:

INDEX = {name: number for number, name in enumerate(CATEGORIES)}
UNDECIDED = -1
MIN_LOGITS = 2**16  # bytes; below it a size says nothing about what it is


@dataclass(frozen=True)
class Placed:
    """Facts about m lives that the rules ask for."""

    code: np.ndarray  # int64 [m], Code of the stack
    phase: np.ndarray  # int64 [m], of the allocation
    freed_in: np.ndarray  # int64 [m], phase of the free; NOT_SAID if none
    same_span: np.ndarray  # bool [m], given back before its phase was over
    same_fine_span: np.ndarray  # bool [m], the same where recomputation is a phase of its own
    unfinished: np.ndarray  # bool [m], neither it nor its phase ends in the record
    outlives_step: np.ndarray  # bool [m]
    known: np.ndarray  # bool [m], a stack, a tag or an event says where it comes from


def placed(record: Record, lives: Lives, phases: Phases) -> Placed:
    n = len(record)
    old, kept = lives.begin < 0, lives.end >= n
    begin, end = np.maximum(lives.begin, 0), np.minimum(lives.end, max(n - 1, 0))
    code = record.stacks.code[lives.stack]
    if n:
        phase = np.where(old, _phase_of_old(lives, phases), phases.of_event[begin])
        freed_in = np.where(kept, NOT_SAID, phases.of_event[end])
        coarse, fine = (~old & ~kept & (span[begin] == span[end]) for span in (phases.span, phases.fine_span))
        unfinished = ~old & kept & (phases.span[begin] == phases.span[-1])
    else:
        phase = _phase_of_old(lives, phases)
        freed_in, (coarse, fine, unfinished) = np.full(len(lives), NOT_SAID), np.zeros((3, len(lives)), bool)
    step_ends = np.array([step.last for step in phases.steps], np.int64)
    outlives = np.searchsorted(step_ends, lives.begin) < np.searchsorted(step_ends, lives.end)
    return Placed(code, phase, freed_in, coarse, fine, unfinished, outlives, ~old | (lives.stack > 0) | (lives.tag > 0))


def _phase_of_old(lives: Lives, phases: Phases) -> np.ndarray:
    """Of what was there before the record: its tag or stack; code without a name made it before training began."""
    by_tag, by_stack = phases.of_tag[lives.tag], phases.of_stack[lives.stack]
    by_stack = np.where(np.isin(by_stack, (NOT_SAID, NUMBER[UNKNOWN])) & (lives.stack > 0), NUMBER[SETUP], by_stack)
    by_stack = np.where(lives.stack > 0, by_stack, NUMBER[UNKNOWN])
    return np.where(by_tag == NOT_SAID, by_stack, by_tag)


def assign_categories(record: Record, lives: Lives, phases: Phases) -> np.ndarray:
    """int64 [m]: an index into CATEGORIES for each life."""
    seen = placed(record, lives, phases)
    found = np.full(len(lives), UNDECIDED)

    def decide(where: np.ndarray, category: str):
        found[where & (found == UNDECIDED)] = INDEX[category]

    unknown = ~seen.known & (lives.begin < 0)
    decide(unknown & (lives.requested == CUBLAS_WORKSPACE), "workspace")  # Hopper's has a size that weights have too
    decide(seen.known & _has(seen, Code.WORKSPACE), "workspace")
    decide(seen.known & _has(seen, Code.COMMUNICATION) & ~_has(seen, Code.GRADIENT_BUFFER), "communication")
    _setup(seen, decide)
    _optimizer(seen, decide)
    _gradients(seen, lives, found, decide)
    logits = _logits(seen, lives, phases)
    _backward(seen, logits, decide)
    _forward(seen, lives, logits, decide)
    decide(seen.known, "other")
    assign_unknown(lives, found, seen.freed_in, INDEX)
    _find_passing_gradients(seen, lives, found)
    left = (found == UNDECIDED) & unknown & (lives.requested == CUBLAS_WORKSPACE_SINCE_HOPPER)
    if left.sum() <= CUBLAS_THREADS:  # more are weights of the same size
        decide(left, "workspace")
    decide(np.ones(len(lives), bool), "before the record")
    return found


def _has(seen: Placed, code: Code) -> np.ndarray:
    return (seen.code & int(code)) > 0


def _in(seen: Placed, *phases: str) -> np.ndarray:
    return np.isin(seen.phase, [NUMBER[str(phase)] for phase in phases])


def _setup(seen: Placed, decide):
    setup = seen.known & _in(seen, SETUP)
    decide(setup & _has(seen, Code.GRADIENT_BUFFER), "gradients")
    decide(setup & _has(seen, Code.MASTER), "master weights")
    decide(setup & _has(seen, Code.OPTIMIZER), "moments")
    decide(setup & _has(seen, Code.LOADER), "other")
    decide(setup & seen.same_span, "workspace")
    decide(setup, "parameters")


def _optimizer(seen: Placed, decide):
    stepping = _in(seen, "optimizer_step") & seen.known
    decide(stepping & seen.same_span, "workspace")
    decide(stepping & _has(seen, Code.MASTER), "master weights")
    decide(stepping, "moments")
    decide(_in(seen, "clip_grad", ZERO_GRAD) & seen.same_span, "workspace")
    decide(_in(seen, "unscale"), "gradients")  # copies in the optimizer's precision
    decide(_in(seen, "grad_sync"), "communication")


def _gradients(seen: Placed, lives: Lives, found: np.ndarray, decide):
    """What outlives its backward. In one that did not end, only a weight's size tells."""
    computed, in_loss = _in(seen, "backward") & seen.known & ~seen.same_span, _has(seen, Code.LOSS)
    weights = lives.requested[found == INDEX["parameters"]]
    decide(computed & ~seen.unfinished & (~in_loss | np.isin(lives.requested, weights)), "gradients")
    sizes = np.union1d(weights, lives.requested[found == INDEX["gradients"]])
    decide(computed & seen.unfinished & ~in_loss & np.isin(lives.requested, sizes), "gradients")


def passing_gradients(seen: Placed, categories: np.ndarray) -> np.ndarray:
    """bool [m]: gradients that end within the backward that computes them, since they are added to others."""
    return (categories == INDEX["gradients"]) & _in(seen, "backward") & seen.same_span


def _find_passing_gradients(seen: Placed, lives: Lives, found: np.ndarray):
    """What has a weight's size, and is the gradient of no activation or logits of that size. To be called when all weights are
    known: the counting of sizes that finds some takes only gradients that stay."""
    of_loss = found == INDEX["logits and loss"]
    weights, activations = (lives.requested[found == INDEX[name]] for name in ("parameters", "activations"))
    logits = np.union1d(activations, lives.requested[of_loss & _in(seen, "forward")])
    passing = _in(seen, "backward") & seen.known & seen.same_span & np.isin(lives.requested, weights)
    # a logits' gradient was told from others by its place already
    by_size = (found == INDEX["workspace"]) & ~np.isin(lives.requested, activations)
    in_loss = of_loss & (_has(seen, Code.WEIGHT_GRADIENT) | ~np.isin(lives.requested, logits))
    found[passing & (by_size | in_loss)] = INDEX["gradients"]


def _backward(seen: Placed, logits: np.ndarray, decide):
    again = _in(seen, RECOMPUTE)
    decide((_in(seen, "backward") | again) & (logits | _has(seen, Code.LOSS)), "logits and loss")
    decide(_in(seen, "backward") & seen.known, "workspace")
    decide(again & seen.same_fine_span, "workspace")
    decide(again, "activations")


def _forward(seen: Placed, lives: Lives, logits: np.ndarray, decide):
    forward = _in(seen, "forward") & seen.known
    decide(forward & (logits | _has(seen, Code.LOSS)), "logits and loss")
    decide(forward & seen.same_span, "workspace")
    decide(forward & seen.outlives_step & (seen.freed_in == NOT_SAID), "other")  # kept on purpose, or by mistake
    decide(forward, "activations")


def _logits(seen: Placed, lives: Lives, phases: Phases) -> np.ndarray:
    """bool [m]: the logits come from an ordinary layer and go to one in backward. They have the size of what the loss
    handles, and in forward a stack that comes once, where layers repeat; in backward they come before all else."""
    loss = _has(seen, Code.LOSS) & _in(seen, "forward", "backward") & (lives.requested >= MIN_LOGITS)
    sized = np.isin(lives.requested, lives.requested[loss]) & (lives.begin >= 0)
    found = np.zeros(len(lives), bool)
    forward = np.flatnonzero(_in(seen, "forward") & (lives.begin >= 0))
    stack_in_span = (
        phases.fine_span[lives.begin[forward]] * (int(lives.stack.max(initial=0)) + 1) + lives.stack[forward]
    )
    _, where, times = np.unique(stack_in_span, return_inverse=True, return_counts=True)
    found[forward] = sized[forward] & (times[where] == 1)
    # of a small model all that a layer makes may have that size: what comes between may be smaller
    least = min(MIN_LOGITS, int(lives.requested[loss].max(initial=0)) // 8)
    computed = _in(seen, "backward") & ~_has(seen, Code.RECOMPUTE) & (lives.begin >= 0)
    backward = np.flatnonzero(computed & (lives.requested >= least))
    span = phases.span[lives.begin[backward]]
    first_other = np.full(int(phases.span.max(initial=0)) + 1, np.iinfo(np.int64).max)
    others = ~sized[backward]
    np.minimum.at(first_other, span[others], lives.begin[backward[others]])
    found[backward] = sized[backward] & (lives.begin[backward] < first_other[span])
    return found
