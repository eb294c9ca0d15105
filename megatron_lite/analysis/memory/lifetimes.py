"""Each piece of memory of a record: when it was handed out and given back, and what is known of it."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.memory.phases import NOT_SAID, NUMBER, UNKNOWN, Phases
from megatron_lite.analysis.memory.record import ALLOC, FREE, FREE_REQUESTED, AllocatorEvents, Ints
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.caching_allocator import MIN_BLOCK_BYTES
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.phases import SETUP

INDEX = {name: number for number, name in enumerate(CATEGORIES)}
UNDECIDED = -1
BEFORE = -1  # the event of what was there before the record; its span, too
NO_SPAN = -1


@dataclass(frozen=True)
class Lives:
    """Lives of m allocations, in order of `begin`.

    A life's memory is held after event e where begin <= e < end.
    """

    events: int  # n, of the record
    begin: Ints  # [m], event of the allocation or BEFORE. Of what awaits its free: event of the request for it
    end: Ints  # [m], event of the free, or of the request for it; n: alive at the end of the record
    returned: Ints  # [m], event after which the memory serves others: `end`, or later if it awaits its free
    awaiting: Flags  # [m], the part of a life after the program gave the memory back, while another stream may use it
    requested: Ints  # [m], bytes asked for
    num_bytes: Ints  # [m], as the allocator rounds them
    address: Ints  # [m]
    stack: Ints  # [m], of the allocation, index into Record.stacks; 0: unknown or empty
    tag: Ints  # [m], the same for Record.tags
    stream: Ints  # [m]
    pool: Ints  # [m], index into Record.pools
    holds: Ints  # [m], index into CATEGORIES of what a library's frame says; UNDECIDED: nothing
    code: Ints  # [m], Code of the stack
    phase: Ints  # [m], of the allocation
    freed_in: Ints  # [m], phase of the free; NOT_SAID if none
    span: Ints  # [m], of the allocation, as Phases numbers them; NO_SPAN: before the record
    fine_span: Ints  # [m], the same where recomputation is a phase of its own
    same_span: Flags  # [m], given back before its phase was over
    same_fine_span: Flags  # [m], the same where recomputation is a phase of its own
    unfinished: Flags  # [m], neither it nor its phase ends in the record
    outlives_step: Flags  # [m]
    known: Flags  # [m], a stack, a tag or an event says where it comes from

    def __len__(self) -> int:
        return len(self.begin)

    def held_after(self, event: int) -> Integers:
        """Rows of what is held after that event."""
        begun = self.begin <= event
        return np.flatnonzero(begun & (self.end > event))

    def has(self, code: Code) -> Flags:
        """Tell for each life (bool [m]) whether a frame of the allocation's stack is such code."""
        return (self.code & int(code)) > 0

    def within(self, *phases: str) -> Flags:
        """Tell for each life (bool [m]) whether it was allocated in one of these phases."""
        return np.isin(self.phase, [NUMBER[phase] for phase in phases])

    def sum_held(self, where: Flags | None = None, amounts: Integers | int | None = None) -> Integers:
        """Sum what lives hold before the first event, then after each: int64 [n + 1], bytes.

        Args:
            where: bool [m], the lives that count; None for all.
            amounts: int64 [m] or one number for all, what each of them holds; None for its bytes.
        """
        held = self.num_bytes if amounts is None else amounts
        if where is not None:
            held = np.where(where, held, 0)
        # one entry after the last event takes the ends of what is alive then
        change = np.zeros(self.events + 2, np.int64)
        np.add.at(change, self.begin + 1, held)
        np.subtract.at(change, self.end + 1, held)
        return np.cumsum(change)[:-1]

    def count_equal_stacks(self, rows: Integers) -> tuple[Integers, Integers]:
        """Count allocations that have the same stack in the same span, recomputation apart.

        Args:
            rows: Indices [k] of the lives to count.

        Returns:
            For each row: how many of the rows have its stack and span, and how many of these come before it.
            int64 [k] each.
        """
        stacks = int(self.stack.max(initial=0)) + 1
        stack_in_span = self.fine_span[rows] * stacks + self.stack[rows]
        # equal ones stand side by side, in the order of the record
        order = np.argsort(stack_in_span, kind="stable")
        _, first, counts = np.unique(stack_in_span[order], return_index=True, return_counts=True)
        equal = np.empty(len(rows), np.int64)
        equal[order] = np.repeat(counts, counts)
        before = np.empty(len(rows), np.int64)
        before[order] = np.arange(len(rows)) - np.repeat(first, counts)
        return equal, before


def find_lifetimes(record: AllocatorEvents, phases: Phases) -> Lives:
    """The pieces of memory of a record, with the phases in which they were handed out and given back."""
    pieces = _split_awaiting(record, _join_events(record))
    begin = pieces.begin
    end = pieces.end
    stack = pieces.stack
    # Each array has one entry more than there are events: index -1, which is BEFORE, and index n, which is the end of
    # what is alive then, both read it.
    phase_of_event = np.append(phases.of_event, NOT_SAID)
    span_of_event = np.append(phases.span, NO_SPAN)
    fine_span_of_event = np.append(phases.fine_span, NO_SPAN)
    span = span_of_event[begin]
    fine_span = fine_span_of_event[begin]
    is_old = begin == BEFORE
    guessed = _guess_phases(phases, stack, pieces.tag)
    phase = np.where(is_old, guessed, phase_of_event[begin])
    last_span = phases.span.max(initial=0)
    in_last_span = span == last_span
    steps_before = _count_steps_before(phases, begin)
    code_of_stack, _ = record.stacks.codes
    return Lives(
        events=len(record),
        begin=begin,
        end=end,
        returned=pieces.returned,
        awaiting=pieces.awaiting,
        requested=pieces.requested,
        num_bytes=_round_sizes(pieces.requested),
        address=pieces.address,
        stack=stack,
        tag=pieces.tag,
        stream=pieces.stream,
        pool=pieces.pool,
        holds=_find_known_categories(record)[stack],
        code=code_of_stack[stack],
        phase=np.where(pieces.awaiting, NOT_SAID, phase),
        freed_in=phase_of_event[end],
        span=span,
        fine_span=fine_span,
        same_span=~is_old & (span == span_of_event[end]),
        same_fine_span=~is_old & (fine_span == fine_span_of_event[end]),
        unfinished=in_last_span & (end == len(record)),
        outlives_step=steps_before < _count_steps_before(phases, end),
        known=~is_old | (stack > 0) | (pieces.tag > 0),
    )


def _round_sizes(requested: Ints) -> Ints:
    """Round sizes to what the allocator takes: int64 [m], bytes, as formats.caching_allocator.rounded computes one."""
    blocks = -(-requested // MIN_BLOCK_BYTES)
    return np.maximum(blocks, 1) * MIN_BLOCK_BYTES


def _count_steps_before(phases: Phases, events: Ints) -> Integers:
    """Count the steps that have ended before each event: int64 [m]."""
    ends = np.array([step.last for step in phases.steps], np.int64)
    return np.searchsorted(ends, events)


def _find_known_categories(record: AllocatorEvents) -> Ints:
    """Find the category that a library's frame tells of each stack: int64 [stacks], an index into CATEGORIES.

    UNDECIDED where none does.
    """
    found = []
    for known in record.stacks.known:
        found.append(INDEX[known.row.holds] if known else UNDECIDED)
    return np.array(found, np.int64)


def _guess_phases(phases: Phases, stack: Ints, tag: Ints) -> Ints:
    """Guess the phase (int64 [m]) of what was there before the record: by its tag, else by its stack."""
    by_stack = phases.of_stack[stack]
    # code without a name made it before training began
    no_name = np.isin(by_stack, (NOT_SAID, NUMBER[UNKNOWN]))
    by_stack = np.where(no_name, NUMBER[SETUP], by_stack)
    by_stack = np.where(stack > 0, by_stack, NUMBER[UNKNOWN])
    by_tag = phases.of_tag[tag]
    return np.where(by_tag == NOT_SAID, by_stack, by_tag)


# --- from events to pieces of memory


@dataclass(frozen=True)
class _Pieces:
    """Columns of Lives without its phases; [m] each."""

    begin: Ints
    end: Ints
    returned: Ints
    awaiting: Flags
    address: Ints
    requested: Ints
    stack: Ints
    tag: Ints
    stream: Ints
    pool: Ints

    def take(self, rows: Integers) -> "_Pieces":
        """Choose the pieces at `rows`, in their order."""
        taken = {name: column[rows] for name, column in vars(self).items()}
        return _Pieces(**taken)

    def sort(self) -> "_Pieces":
        """The pieces in order of `begin`."""
        return self.take(np.argsort(self.begin, kind="stable"))


def _concatenate(parts: list[_Pieces]) -> _Pieces:
    """The pieces of all parts, one part after the other."""
    joined = {}
    for name in vars(parts[0]):
        columns = [getattr(part, name) for part in parts]
        joined[name] = np.concatenate(columns)
    return _Pieces(**joined)


def _join_events(record: AllocatorEvents) -> _Pieces:
    """Join allocations with the next free of the same address.

    What has no allocation was there before; what has no free is there at the end, and where the blocks at the end know
    nothing of it, it stays all the same.
    """
    n = len(record)
    allocations, ends, stray_frees = _pair_frees(record)
    staying = allocations[ends == n]
    known_at_end = record.address[staying]
    live = record.blocks[record.blocks["live"]]
    old = live[~np.isin(live["address"], known_at_end)]
    allocated = _describe_events(record, allocations, allocations, ends)
    before = np.full(len(stray_frees), BEFORE)
    freed = _describe_events(record, stray_frees, before, stray_frees)
    # a free has the stack of who gave the memory back, not of who asked for it
    freed = replace(freed, stack=np.zeros_like(freed.stack), tag=np.zeros_like(freed.tag))
    kept = _Pieces(
        begin=np.full(len(old), BEFORE),
        end=np.full(len(old), n),
        returned=np.full(len(old), n),
        awaiting=np.zeros(len(old), bool),
        address=old["address"],
        requested=old["requested"],
        stack=old["stack"],
        tag=old["tag"],
        stream=old["stream"],
        pool=old["pool"],
    )
    return _concatenate([allocated, freed, kept]).sort()


def _describe_events(
    record: AllocatorEvents,
    events: Ints,  # [k], which tell of the pieces
    begin: Ints,  # [k]
    end: Ints,  # [k]
) -> _Pieces:
    """Pieces of memory as their allocation or their free tells of them."""
    return _Pieces(
        begin=begin,
        end=end,
        returned=end,
        awaiting=np.zeros(len(events), bool),
        address=record.address[events],
        requested=record.size[events],
        stack=record.stack[events].astype(np.int64),
        tag=record.tag[events].astype(np.int64),
        stream=record.stream[events],
        pool=record.pool[events],
    )


def _pair_frees(record: AllocatorEvents) -> tuple[Ints, Ints, Ints]:
    """Events of allocations, of the free of each (n where it has none), and of frees of what was there before."""
    freeing = FREE if np.any(record.action == FREE) else FREE_REQUESTED
    rows = np.flatnonzero(np.isin(record.action, (ALLOC, freeing)))
    # events of one address stand side by side, in the order of the record
    rows = rows[np.argsort(record.address[rows], kind="stable")]
    address = record.address[rows]
    is_alloc = record.action[rows] == ALLOC
    same_address = address[:-1] == address[1:]
    freed_next = same_address & is_alloc[:-1] & ~is_alloc[1:]
    freed = np.flatnonzero(freed_next)
    end = np.full(len(rows), len(record))
    end[freed] = rows[freed + 1]
    is_stray = ~is_alloc
    is_stray[1:] &= ~freed_next
    return rows[is_alloc], end[is_alloc], rows[is_stray]


def _split_awaiting(record: AllocatorEvents, pieces: _Pieces) -> _Pieces:
    """Split pieces that the program gave back while another stream may use them (Tensor.record_stream).

    Such memory has two lives: until the request to free it, and until the allocator may hand it out again. Ordinarily
    the one follows the other at once.
    """
    n = len(record)
    stays = pieces.end == n
    requested_at = _find_requests(record, pieces)
    is_late = requested_at < np.where(stays, n, pieces.end - 1)
    # and what awaits its free at the end without a request in the record
    waiting = record.blocks[record.blocks["awaiting"]]
    is_waiting = np.isin(pieces.address, waiting["address"])
    first = replace(
        pieces,
        end=np.where(is_late, requested_at, pieces.end),
        awaiting=is_waiting & stays & ~is_late,
    )
    late = np.flatnonzero(is_late)
    second = replace(
        pieces.take(late),
        begin=requested_at[late],
        awaiting=np.ones(len(late), bool),
    )
    return _concatenate([first, second]).sort()


def _find_requests(record: AllocatorEvents, pieces: _Pieces) -> Ints:
    """Find the event at which the free of each piece was requested: int64 [m]; n + 1 where the record does not say."""
    n = len(record)
    requests = np.flatnonzero(record.action == FREE_REQUESTED)
    if not len(requests) or not np.any(record.action == FREE):
        return np.full(len(pieces.begin), n + 1)
    # An address and an event make one number, so that one search finds the last request for the same address before
    # the end. Addresses are numbered first: they are too large to be multiplied.
    addresses = np.concatenate([record.address[requests], pieces.address])
    _, number = np.unique(addresses, return_inverse=True)
    of_request = number[: len(requests)]
    of_piece = number[len(requests) :]
    width = n + 2
    keys = np.sort(of_request * width + requests)
    before = np.searchsorted(keys, of_piece * width + pieces.end)
    last = keys[np.maximum(before - 1, 0)]
    last_number, request = np.divmod(last, width)
    found = (before > 0) & (last_number == of_piece)
    found &= request > pieces.begin
    return np.where(found, request, n + 1)
