"""Decide what each piece of memory is for, from where it was allocated and when it was given back.

Works on anybody's snapshot: tags and annotations only make the phases surer.

A weight is made before the first step and stays; its gradient comes in backward, and outlives it or is added to
another; an optimizer's state comes in optimizer.step and stays; an activation comes in forward and waits for backward;
what does not outlive its phase is workspace.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.memory.lifetimes import INDEX, UNDECIDED, Lives
from megatron_lite.analysis.memory.phases import NOT_SAID, NUMBER, UNKNOWN, ZERO_GRAD
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.formats.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_SINCE_HOPPER
from megatron_lite.phases import RECOMPUTE, SETUP

MIN_LOGITS = 2**16  # bytes; below it a size says nothing about what it is

# --- the rules; the first that holds decides


class _Decisions:
    """The category of each life as far as it is decided. What one rule decided, no later one changes."""

    def __init__(self, lives: Lives):
        self.found = np.full(len(lives), UNDECIDED)  # [m], indices into CATEGORIES
        self.lives = lives

    def decide(self, category: str, where: Flags, having: Code = Code.NONE) -> None:
        """Put lives that are undecided into a category.

        Args:
            category: One of CATEGORIES.
            where: bool [m], the lives in question.
            having: Only those with a frame of such code in the stack; Code.NONE for all.
        """
        undecided = where & (self.found == UNDECIDED)
        if having:
            undecided &= self.lives.has(having)
        self.found[undecided] = INDEX[category]

    def has_size_of(self, *categories: str) -> Flags:
        """Tell for each life (bool [m]) whether it has the size of one that is decided to be of these categories."""
        numbers = [INDEX[category] for category in categories]
        sizes = self.lives.requested[np.isin(self.found, numbers)]
        return np.isin(self.lives.requested, sizes)


def assign_categories(lives: Lives) -> Integers:
    """Assign a category to each life: int64 [m], an index into CATEGORIES."""
    decisions = _Decisions(lives)
    logits = _find_logits(lives)
    logits |= lives.has(Code.LOSS)
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
    undecided = decisions.found == UNDECIDED
    named = undecided & lives.known & (lives.holds != UNDECIDED)
    decisions.found[named] = lives.holds[named]
    # Hopper's has a size that weights have too
    has_size = lives.requested == CUBLAS_WORKSPACE
    decisions.decide("workspace", _came_unseen(lives) & has_size)
    decisions.decide("workspace", lives.known, having=Code.WORKSPACE)
    no_buffer = lives.known & ~lives.has(Code.GRADIENT_BUFFER)
    decisions.decide("communication", no_buffer, having=Code.COMMUNICATION)


def _came_unseen(lives: Lives) -> Flags:
    """Tell for each life (bool [m]) whether it was there before the record, and nothing says where it comes from."""
    return ~lives.known & (lives.begin < 0)


def _decide_setup_and_update(decisions: _Decisions) -> None:
    """Decide what was made before training began, and by the optimizer and what belongs to it."""
    lives = decisions.lives
    setup = lives.known & lives.within(SETUP)
    decisions.decide("gradients", setup, having=Code.GRADIENT_BUFFER)
    decisions.decide("master weights", setup, having=Code.MASTER)
    decisions.decide("moments", setup, having=Code.OPTIMIZER)
    decisions.decide("other", setup, having=Code.LOADER)
    decisions.decide("workspace", setup & lives.same_span)
    decisions.decide("parameters", setup)
    stepping = lives.known & lives.within("optimizer_step")
    decisions.decide("workspace", stepping & lives.same_span)
    decisions.decide("master weights", stepping, having=Code.MASTER)
    decisions.decide("moments", stepping)
    clipping = lives.within("clip_grad", ZERO_GRAD)
    decisions.decide("workspace", clipping & lives.same_span)
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
    outlives = outliving & ~lives.unfinished
    of_weights = ~loss | decisions.has_size_of("parameters")
    decisions.decide("gradients", outlives & of_weights)
    may_outlive = outliving & lives.unfinished
    of_weights = ~loss & decisions.has_size_of("parameters", "gradients")
    decisions.decide("gradients", may_outlive & of_weights)
    within_backward = backward | recomputed
    decisions.decide("logits and loss", within_backward & logits)
    decisions.decide("workspace", backward & lives.known)
    decisions.decide("workspace", recomputed & lives.same_fine_span)
    decisions.decide("activations", recomputed)


def _decide_forward(decisions: _Decisions, logits: Flags) -> None:
    """Decide what was made in forward. logits: of forward and backward."""
    lives = decisions.lives
    forward = lives.known & lives.within("forward")
    decisions.decide("logits and loss", forward & logits)
    decisions.decide("workspace", forward & lives.same_span)
    # kept on purpose, or by mistake
    stays = lives.outlives_step & (lives.freed_in == NOT_SAID)
    decisions.decide("other", forward & stays)
    decisions.decide("activations", forward)


def _move_added_gradients(decisions: _Decisions) -> None:
    """Move gradients that are added to others from workspace and logits to gradients.

    They have a weight's size, and are the gradient of no activation or logits of that size. A logits' gradient was told
    from others by its place already.
    """
    lives = decisions.lives
    found = decisions.found
    passing = lives.within("backward") & lives.known & lives.same_span
    of_weights = passing & decisions.has_size_of("parameters")
    of_workspace = found == INDEX["workspace"]
    of_loss = found == INDEX["logits and loss"]
    activation_sizes = lives.requested[found == INDEX["activations"]]
    logits_sizes = lives.requested[of_loss & lives.within("forward")]
    has_size_of_activations = np.isin(lives.requested, activation_sizes)
    has_size_of_logits = np.isin(lives.requested, logits_sizes)
    no_activations = of_workspace & ~has_size_of_activations
    no_logits = of_loss & ~has_size_of_activations & ~has_size_of_logits
    by_name = of_loss & lives.has(Code.WEIGHT_GRADIENT)
    added = no_activations | no_logits | by_name
    found[of_weights & added] = INDEX["gradients"]


def _decide_workspaces_since_hopper(decisions: _Decisions) -> None:
    """Decide what has the size of cuBLAS' workspace on Hopper, if no more than its threads have one."""
    undecided = decisions.found == UNDECIDED
    unseen = undecided & _came_unseen(decisions.lives)
    sized = unseen & (decisions.lives.requested == CUBLAS_WORKSPACE_SINCE_HOPPER)
    # more are weights of the same size
    if sized.sum() <= CUBLAS_THREADS:
        decisions.decide("workspace", sized)


def _find_logits(lives: Lives) -> Flags:
    """Tell for each life (bool [m]) whether it is the logits: from an ordinary layer, and to one in backward.

    They have the size of what the loss handles, and in forward a stack that comes once, where layers repeat; in
    backward they come before all else.
    """
    recorded = (lives.begin >= 0) & ~lives.awaiting
    is_large = lives.requested >= MIN_LOGITS
    in_loss = lives.has(Code.LOSS) & lives.within("forward", "backward")
    loss_sizes = lives.requested[in_loss & is_large]
    sized = recorded & np.isin(lives.requested, loss_sizes)
    found = np.zeros(len(lives), bool)
    forward = np.flatnonzero(recorded & lives.within("forward"))
    equal_stacks, _ = lives.count_equal_stacks(forward)
    found[forward] = sized[forward] & (equal_stacks == 1)
    # of a small model all that a layer makes may have that size: what comes between may be smaller
    largest = int(loss_sizes.max(initial=0))
    is_large = lives.requested >= min(MIN_LOGITS, largest // 8)
    computed = recorded & lives.within("backward") & ~lives.has(Code.RECOMPUTE)
    backward = computed & is_large
    found |= _come_first(lives, backward & sized, backward & ~sized)
    return found


def _come_first(
    lives: Lives,
    candidates: Flags,  # [m], which begin in the record
    others: Flags,  # [m], too
) -> Flags:
    """Tell for each life (bool [m]) whether it is a candidate that begins before all others in its span."""
    spans = int(lives.span.max(initial=0)) + 1
    never = np.iinfo(np.int64).max
    first_other = np.full(spans, never)  # of each span
    np.minimum.at(first_other, lives.span[others], lives.begin[others])
    is_first: Flags = lives.begin < first_other[lives.span]
    return candidates & is_first


# --- memory without stack or tag that was there before the record: told apart by counting equal sizes
#
# Each gradient has one weight of its size, and an optimizer's state and masters come in whole sets of such sizes. The
# set that explains the most bytes is taken; what it does not explain stays unknown.

MAX_MISFIT_SHARE = 0.5  # of the candidates' bytes; beyond it the sizes do not fit and nothing is claimed
# phases in which gradients of the step before are given back
CLEARS_GRADIENTS = (ZERO_GRAD, "forward", "data", "data_to_device", UNKNOWN)


class _OptimizerState(NamedTuple):
    """Tensors that an optimizer keeps for each weight."""

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
    """Write into `found` (indices of categories; negative where undecided) what sizes tell of memory that was there
    before the record."""
    was_there = lives.begin < 0
    rows = np.flatnonzero(was_there & (found == UNDECIDED))
    gradients = np.flatnonzero(found == INDEX["gradients"])
    if not len(rows) or not len(gradients):
        return
    of_gradients = _count_sizes_at_peak(lives, gradients)
    _assign_by_end(lives, found, rows, of_gradients)
    stays = lives.freed_in[rows] == NOT_SAID
    staying = rows[stays]
    state = _choose_optimizer_state(lives.requested[staying], of_gradients)
    if state:
        _assign_sets(lives, found, staying, of_gradients, state)


def _count_sizes_at_peak(lives: Lives, rows: Integers) -> Counter[int]:
    """Count by size those of the lives `rows` that were alive together when most of them were."""
    begin = lives.begin[rows]
    end = lives.end[rows]
    # lives are in order of their begin: so many have begun with each, and so many have ended
    begun = np.arange(1, len(rows) + 1)
    ended = np.searchsorted(np.sort(end), begin, side="right")
    moment = begin[np.argmax(begun - ended)]
    together = rows[(begin <= moment) & (end > moment)]
    return Counter(lives.requested[together].tolist())


def _assign_by_end(
    lives: Lives,
    found: Integers,  # [m]
    rows: Integers,  # of the lives to assign
    of_gradients: Counter[int],  # how many gradients there are of each size
) -> None:
    """Write into `found` what the size and the phase in which memory was given back tell together."""
    freed_in = lives.freed_in[rows]
    requested = lives.requested[rows]
    moment_sizes = lives.requested[found == INDEX["moments"]]
    in_step = freed_in == NUMBER["optimizer_step"]
    replaced = in_step & np.isin(requested, moment_sizes)
    found[rows[replaced]] = INDEX["moments"]
    clearing = [NUMBER[name] for name in CLEARS_GRADIENTS]
    gradient_sizes = list(of_gradients)
    cleared = np.isin(freed_in, clearing) & np.isin(requested, gradient_sizes)
    found[rows[cleared]] = INDEX["gradients"]


def _choose_optimizer_state(sizes: Integers, of_gradients: Counter[int]) -> _OptimizerState | None:
    """Choose the state of an optimizer that explains most of the memory that stays; None if none explains enough.

    Args:
        sizes: bytes of each piece that stays.
        of_gradients: how many gradients there are of each size, and so how many weights.
    """
    have = Counter(sizes.tolist())
    if not have:
        return None

    def count_unexplained(state: _OptimizerState) -> int:
        """Bytes by which what should be there and what is there differ."""
        expected = _count_expected(of_gradients, state)
        differing = 0
        for size in set(have) | set(expected):
            pieces = abs(have[size] - expected[size])
            differing += pieces * size
        return differing

    best = min(HYPOTHESES, key=count_unexplained)
    most = MAX_MISFIT_SHARE * int(sizes.sum())
    return best if count_unexplained(best) <= most else None


def _count_expected(of_gradients: Counter[int], state: _OptimizerState) -> Counter[int]:
    """Count by size the weights, and what an optimizer keeps for them. of_gradients: the same of gradients."""
    expected: Counter[int] = Counter()
    copies = state.masters + state.moments
    for size, count in of_gradients.items():
        expected[size] += count
        expected[size * state.times_gradient] += copies * count
    return expected


def _assign_sets(
    lives: Lives,
    found: Integers,  # [m]
    staying: Integers,  # rows of the lives to assign
    of_gradients: Counter[int],  # how many gradients there are of each size
    state: _OptimizerState,
) -> None:
    """Write into `found` which lives are weights and the optimizer's state, in the order of addresses."""
    waiting: dict[int, list[int]] = defaultdict(list)  # rows by size
    address = lives.address[staying]
    for row in staying[np.argsort(address, kind="stable")].tolist():
        num_bytes = int(lives.requested[row])
        waiting[num_bytes].append(row)

    def assign(category: str, copies: int, times_gradient: int) -> None:
        """Take the next rows of each size: so many copies for each gradient."""
        for size, count in of_gradients.items():
            rows = waiting[size * times_gradient]
            taken = copies * count
            found[rows[:taken]] = INDEX[category]
            del rows[:taken]

    assign("parameters", 1, 1)
    assign("master weights", state.masters, state.times_gradient)
    assign("moments", state.moments, state.times_gradient)
