"""Ranks that meet in one call and do not agree on it: other operations, shapes, types, roots, or another order."""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.postmortem.causes.base import (
    MAX_CITED,
    Confidence,
    Suspicion,
    cite_end,
    cut,
    quote_some,
    write_at,
    write_wait,
)
from megatron_lite.postmortem.causes.call_habits import find_departing, make_each_others_calls
from megatron_lite.postmortem.causes.wait_times import measure_wait
from megatron_lite.postmortem.evidence import EventKind, RecordedCall
from megatron_lite.postmortem.matched_calls import UNNAMED_CALL, EnteredCall, MatchedGroup
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.postmortem.rank_lists import does, find_earliest, name_ranks

OPERATION = "operation"
SHAPES = "shapes"
TYPES = "types"
ROOT = "root"
# ranks may give other amounts, or only the root gives
FREE_INPUTS = ("scatter", "all_to_all", "alltoall", "coalesced")
FREE_OUTPUTS = ("gather", "all_to_all", "alltoall", "coalesced")
# ... but all give and take the same in these
OF_ALL = ("all_gather", "allgather", "reduce_scatter")
ROOTED = ("gather", "scatter")
MAX_SHAPES = 2
# calls after a disagreement that all ranks completed: it did not matter
HARMLESS_AFTER = 2
CHECK = "TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call, and names the ranks and what differs."
WHICH_IS_WRONG = "which of them is wrong: each is the only one of its kind."
# number, operation and shape of a call, by rank
FINGERPRINT = re.compile(
    r"[Rr]ank (\d{1,6}) is running collective: CollectiveFingerPrint\("
    r"((?:SequenceNumber=\d+, )?OpType=\w+(?:, TensorShape=\[[^\]]*\])?(?:, TensorDtypes=\w+)?)"
)
NAMED_RANK = re.compile(r"\b[Rr]ank (\d{1,6})\b")


@dataclass(frozen=True)
class Disagreement:
    """A call on which ranks do not agree."""

    group: MatchedGroup
    number: int
    aspect: str
    # what each rank has, of that aspect
    values: Mapping[int, Hashable]

    @property
    def calls(self) -> Mapping[int, EnteredCall]:
        """The call of each rank whose recorder has it."""
        return _list_named(self.group, self.number)

    @property
    def first(self) -> EnteredCall:
        """The call of the rank that came first."""
        return min(self.calls.values(), key=lambda call: call.created_ns)

    def list_others(self, ranks: Sequence[int]) -> list[int]:
        """List the ranks of the call that are not among some."""
        return [rank for rank in self.calls if rank not in ranks]


def find_mismatches(job: ObservedJob) -> list[Suspicion]:
    """Find the first call in which ranks disagree, of those that may have stopped them."""
    found = []
    for group in job.calls.groups:
        disagreement = _find_disagreement(group)
        if disagreement is not None:
            found.append(disagreement)
    if not found:
        return _find_by_words(job)
    first = min(found, key=lambda one: one.first.created_ns)
    return [_suspect(job, first)]


def _find_disagreement(group: MatchedGroup) -> Disagreement | None:
    for number in group.numbers:
        calls = _list_named(group, number)
        if len(calls) < 2 or _was_harmless(group, number):
            continue
        for aspect, values in _list_aspects(calls).items():
            if len(set(values.values())) > 1:
                return Disagreement(group, number, aspect, values)
    return None


def _list_named(group: MatchedGroup, number: int) -> dict[int, EnteredCall]:
    """The calls of a number that recorders have. Of others only the count is known, with which nobody can disagree."""
    return {rank: call for rank, call in group.calls[number].items() if call.name != UNNAMED_CALL}


def _was_harmless(group: MatchedGroup, number: int) -> bool:
    """Whether all ranks completed the call, and some after it."""
    last = number + HARMLESS_AFTER
    if last > group.entered_by_all:
        return False
    for after in range(number, last + 1):
        if not all(call.has_ended for call in group.calls.get(after, {}).values()):
            return False
    return True


def _list_aspects(calls: Mapping[int, EnteredCall]) -> dict[str, dict[int, Hashable]]:
    """List what must be the same on all ranks of a call, by aspect and rank, weightiest first."""
    names: dict[int, Hashable] = {}
    shapes: dict[int, Hashable] = {}
    types: dict[int, Hashable] = {}
    roots: dict[int, Hashable] = {}
    for rank, call in calls.items():
        names[rank] = call.names
        operations = call.parts or (call.call,)
        shapes[rank] = tuple(map(_read_shapes, operations))
        told = tuple(one.input_types or one.output_types for one in operations)
        if any(told):
            types[rank] = told
        if _seems_root(call.call):
            roots[rank] = rank
    if len(set(names.values())) > 1:
        return {OPERATION: names}
    return {SHAPES: shapes, TYPES: types, ROOT: roots}


def _read_shapes(call: RecordedCall) -> Hashable:
    """The shapes that must be alike, () in place of what may differ."""
    inputs = call.input_shapes
    outputs = call.output_shapes
    if not any(word in call.name for word in OF_ALL):
        inputs = () if any(word in call.name for word in FREE_INPUTS) else inputs
        outputs = () if any(word in call.name for word in FREE_OUTPUTS) else outputs
    return inputs, outputs


def _seems_root(call: RecordedCall) -> bool:
    """Whether a rank gathers or scatters as the root does: only the root has both tensors."""
    return call.name in ROOTED and bool(call.input_shapes) and bool(call.output_shapes)


def _suspect(job: ObservedJob, found: Disagreement) -> Suspicion:
    """Make a suspicion of a call on which ranks disagree."""
    calls = found.calls
    odd, is_sure = _find_odd(found)
    kind = _choose_kind(job, found)
    shown = odd[0]
    usual = next(rank for rank in found.values if found.values[rank] != found.values[shown])
    confidence = Confidence.HIGH if is_sure else Confidence.MEDIUM
    missing = []
    unread = found.group.unread
    if unread:
        confidence = Confidence.MEDIUM
        missing.append(f"flight recordings of {name_ranks(unread)}: what they called as #{found.number}.")
    lasted = write_wait(measure_wait(job, found.first))
    return Suspicion(
        kind=kind,
        ranks=odd,
        headline=f"{_describe(job, found, odd, usual)} (#{found.number} of {found.group.title}){lasted}",
        confidence=confidence,
        evidence=tuple(_cite_calls(job, found, odd)),
        next_steps=(_suggest(kind, calls[shown], calls[usual]),),
        onset=found.first.created_s,
        collective=found.group.describe(calls[usual].name, found.number),
        call_site=calls[shown].call_site,
        alternatives=() if is_sure else (WHICH_IS_WRONG,),
        missing=tuple(missing),
        is_wait=True,
    )


def _describe(job: ObservedJob, found: Disagreement, odd: tuple[int, ...], usual: int) -> str:
    """Write who calls what where others call something else.

    Args:
        job: The job.
        found: The disagreement.
        odd: Who is to blame.
        usual: A rank that calls something else than the first of them.
    """
    mine = _describe_call(found.calls[odd[0]], found.aspect)
    theirs = _describe_call(found.calls[usual], found.aspect)
    if found.aspect == ROOT:
        return f"{job.name(tuple(sorted(found.values)))} each call {mine}"
    if usual in odd:
        return f"{job.name(odd)} disagree: rank {odd[0]} calls {mine}, rank {usual} calls {theirs}"
    others = found.list_others(odd)
    call = does(odd, "calls", "call")
    they_call = does(others, "calls", "call")
    return f"{job.name(odd)} {call} {mine} where {name_ranks(others)} {they_call} {theirs}"


def _describe_call(call: EnteredCall, aspect: str) -> str:
    """Write a call with what matters: "all_reduce of (12,)", "broadcast at train.py:8"."""
    words = call.name
    shapes: list[tuple[int, ...]] = []
    types: list[str] = []
    for operation in call.parts or (call.call,):
        shapes += operation.input_shapes or operation.output_shapes
        types += operation.input_types or operation.output_types
    if aspect == SHAPES:
        words += f" of {', '.join(map(str, shapes[:MAX_SHAPES]))}"
    if aspect == TYPES:
        words += f" of {', '.join(types[:MAX_SHAPES])}"
    if aspect == ROOT:
        words += " as its root"
    return words + write_at(call.call_site)


def _cite_calls(job: ObservedJob, found: Disagreement, odd: tuple[int, ...]) -> list[Fact]:
    """Cite calls of odd ranks, and some of others."""
    others = found.list_others(odd)
    facts = []
    for rank in (*odd[:MAX_CITED], *others[:MAX_CITED]):
        said = _describe_call(found.calls[rank], found.aspect)
        text = f"rank {rank} called {said} as #{found.number} of {found.group.title}"
        facts.append(Fact(text=text, source=job.calls.find_source(rank)))
    return facts


def _suggest(kind: FailureKind, mine: EnteredCall, theirs: EnteredCall) -> str:
    if kind is FailureKind.OTHER_ORDER:
        sites = [call.call_site or call.name for call in (mine, theirs)]
        return f"Let all ranks make the same calls in the same order: compare {sites[0]} and {sites[1]}."
    return f"Give the call the same arguments on all ranks{write_at(mine.call_site)}. {CHECK}"


def _find_odd(found: Disagreement) -> tuple[tuple[int, ...], bool]:
    """Find who is to blame for a disagreement: the few, else who departs from habit, else all.

    Returns:
        The ranks, and whether it is sure that it is they.
    """
    (most, often), *_ = Counter(found.values.values()).most_common(1)
    if found.aspect == ROOT:
        return _find_odd_roots(found), False
    if often > len(found.values) / 2:
        return tuple(sorted(rank for rank, value in found.values.items() if value != most)), True
    departing = find_departing(found.group, found.number, by_place=found.aspect == OPERATION)
    if departing:
        return departing, True
    return tuple(sorted(found.values)), False


def _find_odd_roots(found: Disagreement) -> tuple[int, ...]:
    """Find the ranks that take themselves for the root: those that did not before, else all but the first rank."""
    name = found.first.name
    former = set()
    for number in found.group.numbers:
        for rank, call in found.group.calls[number].items():
            if number < found.number and call.name == name and _seems_root(call.call):
                former.add(rank)
    # what most programs take
    usual = former or {min(found.group.members)}
    odd = tuple(sorted(rank for rank in found.values if rank not in usual))
    return odd if len(odd) < len(found.values) else tuple(sorted(found.values))


def _choose_kind(job: ObservedJob, found: Disagreement) -> FailureKind:
    """Choose between other arguments at one place and another order of calls: lines and other calls tell."""
    sites = {call.call_site for call in found.calls.values()}
    crosses = make_each_others_calls(job.calls.by_rank, found.calls)
    if crosses or (len(sites) > 1 and found.aspect == OPERATION):
        return FailureKind.OTHER_ORDER
    return FailureKind.OTHER_ARGUMENTS


def _find_by_words(job: ObservedJob) -> list[Suspicion]:
    """Find a disagreement that a library reports, where no recording shows it."""
    events = job.list_events(EventKind.COLLECTIVE_MISMATCH)
    ends = [end for end in job.ends if end.kind is EndKind.DISAGREEMENT]
    evidence = [*quote_some(events)]
    evidence += [cite_end(job, end, f"ended with {end.words}") for end in ends[:MAX_CITED]]
    if not evidence:
        return []
    texts = [event.text for event in events]
    texts += [end.message for end in ends]
    said = texts[0]
    ranks = _read_odd_ranks(texts)
    times = [event.at for event in events]
    times += [end.at for end in ends]
    who = name_ranks(ranks) if ranks else "ranks"
    return [
        Suspicion(
            kind=_read_kind(said),
            ranks=ranks,
            headline=f"{who} called a collective that does not match the others': {cut(said)}",
            confidence=Confidence.MEDIUM,
            evidence=tuple(evidence),
            next_steps=(CHECK,),
            onset=find_earliest(times),
            missing=("flight recordings of all ranks: which call it was, and on which rank it differs.",),
            is_wait=True,
        )
    ]


def _read_odd_ranks(texts: Sequence[str]) -> tuple[int, ...]:
    """Read who called something else than most, by the words of torch's own check; else all that are named."""
    called: dict[int, str] = {}
    for text in texts:
        for rank, fingerprint in FINGERPRINT.findall(text):
            called[int(rank)] = fingerprint
    if not called:
        return tuple(sorted({int(rank) for rank in NAMED_RANK.findall(texts[0])}))
    ((most, often),) = Counter(called.values()).most_common(1)
    odd = tuple(sorted(rank for rank, fingerprint in called.items() if fingerprint != most))
    return odd if odd and often > len(odd) else tuple(sorted(called))


def _read_kind(said: str) -> FailureKind:
    """Read whether a message speaks of another order or of other arguments."""
    _, _, differs = said.partition("differ in")
    if "Op type" in differs or "Sequence number" in differs:
        return FailureKind.OTHER_ORDER
    return FailureKind.OTHER_ARGUMENTS
