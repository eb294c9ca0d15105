"""Compares what two commands recorded, and says whether both compute the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from megatron_lite.analysis.equality.call_order import CallOrder
from megatron_lite.analysis.equality.check_data import check_data
from megatron_lite.analysis.equality.check_gradients import check_gradients, write_ratio
from megatron_lite.analysis.equality.check_outputs import STATISTICS_REMEDY, check_outputs, describe_name
from megatron_lite.analysis.equality.check_random import check_dropout, check_start
from megatron_lite.analysis.equality.check_shards import name_wrong_order
from megatron_lite.analysis.equality.check_updates import (
    MAX_RANKS_WRITTEN,
    NormCheck,
    Updates,
    compute_norm,
    find_early_clipping,
)
from megatron_lite.analysis.equality.compared_parts import ComparedPart, ComparedParts, collect_entries, group_replicas
from megatron_lite.analysis.equality.facts import OWN_MEAN, LayoutFacts
from megatron_lite.analysis.equality.fused_parts import split_fused_parts
from megatron_lite.analysis.equality.gradient_patterns import list_distinct
from megatron_lite.analysis.equality.losses import compare_losses
from megatron_lite.analysis.equality.measure import LATER_STEPS, Precision, Rounding, find_precision, measure_rounding
from megatron_lite.analysis.equality.outputs import ComparedOutput, Likeness, compare_outputs
from megatron_lite.analysis.equality.own_sum import collect_own_sums, find_weights, read_local_gradients
from megatron_lite.analysis.equality.placing import Places, place_parameters
from megatron_lite.analysis.equality.proved_run import Array, Parts, ProvedRun, RankRun, list_rows
from megatron_lite.analysis.equality.rows import build_row
from megatron_lite.analysis.equality.same_data import Roles, find_part, find_roles, has_same_rows, read_start
from megatron_lite.analysis.equality.sliced_samples import name_sliced_samples
from megatron_lite.analysis.equality.wholes import assemble_all
from megatron_lite.formats.prove_record import ProveRecord
from megatron_lite.formats.prove_report import NOTHING_COMPARED, ComparedRow, Difference, ErrorKind, ProofReport
from megatron_lite.units import counted

OWN_SUM = "the mean of the ranks' own gradients"
UNTOLD = (Likeness.DIFFERS, Likeness.UNMATCHED)  # outputs that, where gradients agree, were others than was thought
WHOLLY = "whole"
PARTLY = "partial"
MAX_NAMED_PARAMETERS_LEFT = 3  # parameters that a line on what was not compared names


@dataclass
class _Answer:
    """The parts of the answer that were found so far."""

    rows: list[ComparedRow] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    coverage: str = WHOLLY

    def leave_out(self, *sentences: str) -> None:
        """Note what was not compared."""
        self.not_compared += sentences
        if sentences and self.coverage == WHOLLY:
            self.coverage = PARTLY


@dataclass(frozen=True)
class _Sides:
    """Everything that is known of both runs before tensors are compared."""

    run: ProvedRun
    reference: ProvedRun
    perturbed: ProvedRun | None
    # the reference's whole weights at the start, and its other names of them
    start: Mapping[str, Array]
    aliases: Mapping[str, str]
    places: Places
    roles: Roles
    order: CallOrder
    facts: LayoutFacts
    precision: Precision

    @property
    def steps(self) -> int:
        return min(self.run.steps, self.reference.steps)

    def measure(
        self, list_parts: Callable[[RankRun, int], Parts], step: int
    ) -> tuple[dict[str, Array], Rounding, Mapping[str, Array] | None]:
        """The reference's wholes of a kind in a step, what rounding allows for them, and the perturbed run's wholes."""
        wholes = _assemble_step(self.reference, list_parts, step, self.aliases)
        others = None
        if self.perturbed is not None and self.perturbed.steps > step:
            others = _assemble_step(self.perturbed, list_parts, step, self.aliases)
        factor = LATER_STEPS if step else 1.0
        rounding = measure_rounding(self.precision, wholes, others, factor)
        return wholes, rounding, others

    def collect(
        self, list_parts: Callable[[RankRun, int], Parts], step: int, wholes: Mapping[str, Array], rounding: Rounding
    ) -> ComparedParts:
        """Lay the ranks' parts of a kind beside the reference's wholes."""
        return collect_entries(
            self.run,
            self.places,
            lambda rank: list_parts(rank, step),
            wholes,
            rounding,
        )


def _list_gradients(rank: RankRun, step: int) -> Parts:
    return rank.record.steps[step].gradients


def _list_weights(rank: RankRun, step: int) -> Parts:
    return rank.record.steps[step].weights


def _assemble_step(
    run: ProvedRun, list_parts: Callable[[RankRun, int], Parts], step: int, aliases: Mapping[str, str]
) -> dict[str, Array]:
    found = assemble_all(run, lambda rank: list_parts(rank, step), aliases)
    return {name: whole.array for name, whole in found.items()}


def compare(
    run: ProvedRun,
    reference: ProvedRun | None,
    perturbed: ProvedRun | None = None,
    *,
    probe: ProvedRun | None = None,
    start: Mapping[str, Array] | None = None,
    command: str = "",
    reference_command: str = "",
) -> ProofReport:
    """Compare what two commands recorded.

    Args:
        run: The records of the command that is proved.
        reference: The records of the command that it is laid beside, on the same samples and weights; None where there
            is none, so that the ranks' own gradients must do.
        perturbed: The records of the reference with weights that differ by rounding.
        probe: The records of the reference by itself, where it was fed afterwards.
        start: The whole weights, by the reference's names, that it was fed.
        command: The command that is proved, for the answer.
        reference_command: The command of the reference, for the answer.
    """
    answer = _Answer()
    answer.leave_out(*run.missing)
    answer.notes += _list_notes(run)
    if not run.ranks or not run.steps:
        answer.leave_out("the command ended before its first update of the weights")
        answer.coverage = NOTHING_COMPARED
    elif reference is None or not reference.ranks or not reference.steps:
        if reference is not None:
            answer.leave_out(*(f"reference: {line}" for line in reference.missing))
        _compare_alone(run, answer)
        reference = None
    else:
        probe = probe if probe is not None and probe.ranks and probe.steps else None
        sides = _read_sides(run, reference, perturbed, probe, start)
        # numbers that are not finite are said to be, in the answer
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            _compare_sides(sides, probe, start is not None, answer)
    return ProofReport(
        command=command,
        reference=OWN_SUM if reference is None else reference_command,
        ranks=run.world,
        reference_ranks=0 if reference is None else reference.world,
        rows=tuple(answer.rows),
        differences=tuple(answer.differences),
        not_compared=tuple(dict.fromkeys(answer.not_compared)),
        notes=tuple(dict.fromkeys(answer.notes)),
        coverage=answer.coverage,
    )


def compare_with_own_sum(run: ProvedRun, command: str = "") -> ProofReport:
    """Compare gradients with the mean of the ranks' own ones: what plain data parallelism is to make of them.

    Args:
        run: The records of the command that is proved.
        command: The command, for the answer.
    """
    return compare(run, None, command=command)


def _list_notes(run: ProvedRun) -> list[str]:
    """List what ran, and what was not recorded."""
    notes = [note for rank in run.ranks.values() for note in rank.record.notes]
    if run.engines:
        notes.append(f"what brought ranks together: {', '.join(run.engines)}")
    dropouts = {name for rank in run.ranks.values() for name in rank.record.dropouts}
    if dropouts:
        notes.append(f"dropout was switched off in {counted(len(dropouts), 'module')}")
    return notes


def _read_sides(
    run: ProvedRun,
    reference: ProvedRun,
    perturbed: ProvedRun | None,
    probe: ProvedRun | None,
    fed: Mapping[str, Array] | None,
) -> _Sides:
    own_start, aliases = read_start(reference)
    run = name_sliced_samples(run, reference if probe is None else probe)
    start = own_start if fed is None else {**own_start, **fed}
    run = split_fused_parts(run, start, aliases)
    places = place_parameters(run, start, aliases)
    roles = find_roles(run, places, reference)
    return _Sides(
        run=run,
        reference=reference,
        perturbed=perturbed,
        start=start,
        aliases=aliases,
        places=places,
        roles=roles,
        order=CallOrder.read(reference),
        facts=LayoutFacts.read(run, roles, reference),
        precision=find_precision([run, reference]),
    )


def _compare_sides(sides: _Sides, probe: ProvedRun | None, is_fed: bool, answer: _Answer) -> None:
    """Compare in the order in which errors follow each other: data, weights, forward, gradients, norm, update."""
    answer.leave_out(*(f"reference: {line}" for line in sides.reference.missing))
    unfed = probe if probe is not None else sides.reference
    answer.differences += check_data(sides.run, sides.roles, unfed)
    at_start = _check_start(sides, unfed, is_fed)
    answer.differences += at_start
    answer.leave_out(*_list_unplaced(sides))
    if not at_start:
        before = len(answer.differences)
        _compare_numbers(sides, answer)
        is_more = len(answer.differences) > before
        if is_fed and is_more:
            _doubt_guesses(sides, unfed, answer)
    elif not answer.rows:
        answer.leave_out("gradients, as the ranks' weights differ at the start already")
    answer.differences += check_dropout(sides.run, sides.roles)
    answer.notes += _note_statistics(sides, answer.differences)


def _doubt_guesses(sides: _Sides, unfed: ProvedRun, answer: _Answer) -> None:
    """Lower the confidence where the reference was fed weights whose parts lie as it was guessed."""
    start, aliases = read_start(unfed)
    places = place_parameters(sides.run, start, aliases)
    guessed = []
    for place in places.found.values():
        if place.is_guessed and not place.is_constant:
            guessed.append(place.name)
    if not guessed:
        return
    names = _write_names(list(dict.fromkeys(guessed)))
    answer.leave_out(f"{names}: nothing tells which block each rank has; they were taken in the order of the ranks")
    answer.differences = [msgspec.structs.replace(one, confidence="low") for one in answer.differences]


def _check_start(sides: _Sides, unfed: ProvedRun, is_fed: bool) -> list[Difference]:
    """Name errors of the weights at the start, beside those that the reference makes itself."""
    if not is_fed:
        return check_start(sides.run, sides.places, sides.start, sides.order)
    start, aliases = read_start(unfed)
    places = place_parameters(sides.run, start, aliases)
    return check_start(sides.run, places, start, sides.order)


def _list_unplaced(sides: _Sides) -> list[str]:
    unknown = [name for _, name in sides.places.unknown]
    lines = []
    if unknown:
        names = list(dict.fromkeys(unknown))
        lines.append(f"{_write_names(names)}: the reference has no such parameter")
    held = {place.name for place in sides.places.found.values()}
    lacking = [name for name in sides.start if name not in held]
    if lacking:
        lines.append(f"{_write_names(lacking)}: no rank has such a parameter")
    return lines


def _write_names(names: list[str]) -> str:
    named = ", ".join(names[:MAX_NAMED_PARAMETERS_LEFT])
    rest = len(names) - MAX_NAMED_PARAMETERS_LEFT
    return f"{named} and {rest} more" if rest > 0 else named


def _note_statistics(sides: _Sides, differences: list[Difference]) -> list[str]:
    """Note modules that normalize by a rank's batch, where that made no difference."""
    if len(sides.roles.data_ranks) < 2:
        return []
    if any(one.kind is ErrorKind.LOCAL_STATISTICS for one in differences):
        return []
    modules = _list_local_statistics(sides.run)
    if not modules:
        return []
    return [f"{_write_names(modules)}: normalizes by each rank's own batch, which may differ from one rank's"]


def _list_local_statistics(run: ProvedRun) -> list[str]:
    modules = []
    for rank in run.ranks.values():
        for output in rank.record.outputs:
            if output.has_local_statistics:
                modules.append(output.module)
    return list(dict.fromkeys(modules))


def _compare_numbers(sides: _Sides, answer: _Answer) -> None:
    """Compare losses, outputs, gradients and updates, if both runs had the same samples and weights."""
    own_places = place_parameters(sides.reference, sides.start, sides.aliases)
    own = find_roles(sides.reference, own_places)
    reason = ""
    if not has_same_rows(sides.run, sides.roles, sides.reference, own, 1):
        reason = "the reference took other samples"
    elif not all(place.is_same for place in sides.places.found.values()):
        reason = "the reference began with other weights"
    if reason:
        answer.leave_out(f"losses, outputs and updates, as {reason}; gradients were compared with {OWN_SUM}")
        _compare_own_sums(sides.run, sides.places, sides.roles, sides.order, answer)
        return
    outputs = compare_outputs(
        sides.run,
        sides.places,
        sides.roles,
        sides.reference,
        sides.perturbed,
        sides.precision,
        sides.start,
    )
    compared: set[str] = set()
    for step in range(sides.steps):
        if step and not has_same_rows(sides.run, sides.roles, sides.reference, own, step + 1):
            answer.leave_out(f"step {step + 1}: the reference took other samples")
            break
        # those of later steps are not recorded
        of_step = outputs if step == 0 else []
        found = _compare_step(sides, step, of_step, answer, compared)
        answer.differences += found
        if found:
            break
    left = [name for name in sides.start if name not in compared and _has_gradient(sides, name)]
    if not compared and not answer.differences:
        answer.leave_out("gradients: none of both runs could be laid beside each other")
        answer.coverage = NOTHING_COMPARED
    elif left and not any(one.kind is ErrorKind.NO_GRADIENT for one in answer.differences):
        answer.leave_out(f"{_write_names(left)}: gradients do not fit each other")


def _has_gradient(sides: _Sides, name: str) -> bool:
    if all(place.name != name for place in sides.places.found.values()):
        return False
    first = sides.reference.ranks[min(sides.reference.ranks)]
    for part in first.record.steps[0].gradients:
        if part.key and sides.aliases.get(part.name, part.name) == name:
            return True
    return False


def _add_outputs(outputs: list[ComparedOutput], agrees: bool, answer: _Answer) -> None:
    """Add the row of the outputs that are the reference's, and of those that differ where gradients do, too."""
    counted_ones = (Likeness.EQUAL,) if agrees else (Likeness.EQUAL, Likeness.DIFFERS)
    told = [output for output in outputs if output.likeness in counted_ones]
    measured = [output.measured for output in told if output.measured is not None]
    if measured:
        worst = max(measured, key=lambda one: one.error / one.tolerance)
        row = build_row(
            "step 1: outputs of modules",
            worst.error,
            worst.tolerance,
            tensors=len(measured),
        )
        answer.rows.append(row)
    left = []
    for output in outputs:
        if output.likeness in UNTOLD and output.likeness not in counted_ones:
            left.append(describe_name(output.key.module))
    if left:
        names = _write_names(list(dict.fromkeys(left)))
        answer.notes.append(f"outputs of {names} could not be laid beside the reference's")


def _compare_step(
    sides: _Sides, step: int, outputs: list[ComparedOutput], answer: _Answer, compared: set[str]
) -> list[Difference]:
    """Compare one step, and return the error that it shows first."""
    wholes, rounding, _ = sides.measure(_list_gradients, step)
    entries = sides.collect(_list_gradients, step, wholes, rounding)
    compared.update(entries.compared)
    differs = bool(entries.differing or entries.surplus)
    agrees = bool(entries.compared) and not differs
    _add_outputs(outputs, agrees, answer)
    row = compare_losses(sides.run, sides.reference, sides.perturbed, sides.precision, step)
    if row is not None:
        answer.rows.append(row)
    if entries.compared:
        answer.rows.append(_build_gradient_row(entries, step))
    forward = [name_wrong_order(one, sides.places) for one in check_outputs(outputs)]
    if differs:
        return forward + _explain_gradients(sides, step, entries, forward, rounding, answer)
    if not entries.compared:
        return forward
    if row is not None and _is_beyond(row):
        answer.notes.append(f"{row.name}: backward was called on other losses than in the reference; gradients agree")
    return _compare_update(sides, step, wholes, rounding, entries, answer)


def _is_beyond(row: ComparedRow) -> bool:
    """Whether rounding does not explain a row's difference, which is unknown where numbers are not finite."""
    if row.difference is None:
        return True
    return row.difference > row.tolerance


def _build_gradient_row(entries: ComparedParts, step: int) -> ComparedRow:
    worst = entries.worst
    squares = []
    for parts in entries.compared.values():
        square = np.square(parts[0].whole).sum()
        squares.append(float(square))
    return build_row(
        f"step {step + 1}: gradients",
        worst.error if worst else 0.0,
        worst.tolerance if worst else 0.0,
        reference=float(np.sqrt(sum(squares))),
        proved=compute_norm(entries),
        tensors=len(entries.compared),
    )


def _explain_gradients(
    sides: _Sides, step: int, entries: ComparedParts, forward: list[Difference], rounding: Rounding, answer: _Answer
) -> list[Difference]:
    """Say which error gradients show that differ, apart from what follows from the forward."""
    if forward:
        # they follow from the forward; what ranks made of their own gradients shows what does not
        own = collect_own_sums(sides.run, sides.places, sides.roles, rounding, step)
        if not own.differing:
            return []
        facts = replace(sides.facts, expected=OWN_MEAN)
        found = check_gradients(own, sides.order, facts, step + 1)
        return [one for one in found if one.kind is not ErrorKind.UNKNOWN]
    found = check_gradients(entries, sides.order, sides.facts, step + 1)
    early = find_early_clipping(sides.run, entries, found, step)
    if early is not None:
        return [early]
    if all(one.kind is not ErrorKind.UNKNOWN for one in found):
        return found
    return _explain_rest(sides, step, entries, rounding, answer, found)


def _explain_rest(
    sides: _Sides, step: int, entries: ComparedParts, rounding: Rounding, answer: _Answer, found: list[Difference]
) -> list[Difference]:
    """Look for reasons of gradients that no pattern explains: ranks' weights in the mean, and local statistics."""
    first = found[0]
    if not sides.roles.is_cut and len(sides.roles.stages) == 1:
        weights = _find_other_weights(sides, step, entries, rounding)
        if weights is not None:
            theirs, mine = weights
            return _describe_weights(sides, first, theirs, mine, answer)
    statistics = _list_local_statistics(sides.run)
    if statistics and len(sides.roles.data_ranks) > 1 and not step:
        return [
            Difference(
                kind=ErrorKind.LOCAL_STATISTICS,
                where=statistics[0],
                step=1,
                evidence=f"{first.evidence}; {statistics[0]} normalizes by the statistics of each rank's own batch",
                remedy=STATISTICS_REMEDY,
                others=tuple(statistics[1:]),
                confidence="medium",
            )
        ]
    return found


def _find_other_weights(
    sides: _Sides, step: int, entries: ComparedParts, rounding: Rounding
) -> tuple[Mapping[int, float], Mapping[int, float]] | None:
    """Find by which weights ranks' gradients are in the reference's, and in their own sum; None where by the same."""
    if not all(_are_one(parts) for parts in entries.compared.values()):
        return None
    local = read_local_gradients(sides.run, sides.places, step)
    ranks = sorted(sides.run.ranks)
    whole = {}
    summed = {}
    allowed = 0.0
    for name, parts in entries.compared.items():
        whole[name] = parts[0].whole
        summed[name] = parts[0].array
        allowed = max(allowed, rounding.allow(name))
    tolerance = 2 * allowed
    theirs = find_weights(whole, local, ranks, tolerance)
    mine = find_weights(summed, local, ranks, tolerance)
    if theirs is None or mine is None or theirs.is_near(mine):
        return None
    return theirs.weights, mine.weights


def _are_one(parts: Sequence[ComparedPart]) -> bool:
    """Whether all ranks have the same part of a gradient."""
    return len(group_replicas(parts)) == 1 and len(list_distinct(parts)) == 1


def _describe_weights(
    sides: _Sides, first: Difference, theirs: Mapping[int, float], mine: Mapping[int, float], answer: _Answer
) -> list[Difference]:
    """Report ranks that weigh otherwise in the gradient than in the reference's."""
    counts = [len(list_rows(sides.run.ranks[rank], 0)) for rank in theirs]
    written = []
    for rank in sorted(theirs)[:MAX_RANKS_WRITTEN]:
        own = write_ratio(mine[rank])
        other = write_ratio(theirs[rank])
        written.append(f"rank {rank} {own} for {other}")
    figures = ", ".join(written)
    if len(set(counts)) > 1:
        answer.leave_out(
            f"gradients: ranks have {', '.join(map(str, counts))} samples, and the mean of their means is not "
            f"that of the batch ({figures})"
        )
        return []
    return [
        Difference(
            kind=ErrorKind.FACTOR,
            where=first.where,
            step=first.step,
            evidence=f"ranks weigh otherwise in the gradient than in the reference's: {figures}",
            remedy="divide the loss by what all ranks together count, such as their tokens, not by each rank's own",
            others=first.others,
            confidence="medium",
        )
    ]


def _compare_update(
    sides: _Sides,
    step: int,
    gradients: Mapping[str, Array],
    rounding: Rounding,
    entries: ComparedParts,
    answer: _Answer,
) -> list[Difference]:
    """Compare norms and updates of gradients that agree."""
    norms = NormCheck(sides.run, sides.reference, entries, sides.precision, step)
    row = norms.build_row()
    if row is not None:
        answer.rows.append(row)
    found = norms.check()
    if found:
        return found
    wholes, of_weights, others = sides.measure(_list_weights, step)
    if not wholes:
        return []
    before = sides.start
    if step:
        before = _assemble_step(sides.reference, _list_weights, step - 1, sides.aliases)

    def read_before(entry: ComparedPart) -> Array | None:
        rank = sides.run.ranks[entry.rank]
        parts = rank.record.weights if step == 0 else _list_weights(rank, step - 1)
        part = find_part(parts, entry.own_name)
        array = None if part is None else rank.read(part)
        if array is None or array.shape != entry.array.shape:
            return None
        return array

    first = next(iter(sides.reference.ranks.values()))
    updates = Updates(
        after=sides.collect(_list_weights, step, wholes, of_weights),
        before=read_before,
        reference_before=before,
        gradients=gradients,
        rounding=rounding,
        perturbed=_subtract(others or {}, before),
        dtypes=_read_dtypes(first.record),
        step=step + 1,
    )
    result = updates.compare(sides.order)
    if result.row is not None:
        answer.rows.append(result.row)
    return result.differences


def _subtract(after: Mapping[str, Array], before: Mapping[str, Array]) -> dict[str, Array]:
    """Compute how far weights moved in an update, of those that are known before it."""
    moved = {}
    for name, array in after.items():
        if name in before:
            moved[name] = array - before[name]
    return moved


def _read_dtypes(record: ProveRecord) -> dict[str, str]:
    return {part.name: part.dtype for part in record.weights}


def _compare_alone(run: ProvedRun, answer: _Answer) -> None:
    """Compare ranks with themselves, where there is no reference."""
    start, aliases = read_start(run)
    places = place_parameters(run, start, aliases)
    roles = find_roles(run, places)
    order = CallOrder.read(run)
    answer.differences += check_data(run, roles, None)
    found = check_start(run, places, start, order)
    # the start is the ranks' own, of which they can only disagree
    at_start = [one for one in found if one.kind is ErrorKind.RANDOM_MUST_AGREE]
    answer.differences += at_start
    answer.leave_out("losses, outputs and updates, as there is no reference")
    if not at_start:
        _compare_own_sums(run, places, roles, order, answer)
    answer.differences += check_dropout(run, roles)


def _compare_own_sums(run: ProvedRun, places: Places, roles: Roles, order: CallOrder, answer: _Answer) -> None:
    """Compare gradients with the mean of the ranks' own ones."""
    precision = find_precision([run])
    facts = LayoutFacts.read(run, roles, None)
    is_any = False
    for step in range(run.steps):
        local = read_local_gradients(run, places, step)
        means = {}
        for name, arrays in local.items():
            means[name] = np.mean(list(arrays.values()), axis=0)
        rounding = measure_rounding(precision, means, None)
        entries = collect_own_sums(run, places, roles, rounding, step)
        if not entries.compared:
            continue
        is_any = True
        answer.rows.append(_build_gradient_row(entries, step))
        found: list[Difference] = []
        if entries.differing:
            found = check_gradients(entries, order, facts, step + 1)
            found = _doubt_own_sum(found, entries, local, sorted(run.ranks), answer)
        if not found:
            found = NormCheck(run, None, entries, precision, step).check()
        answer.differences += found
        if found:
            break
    if not is_any:
        answer.leave_out("gradients: no rank recorded whole ones before they were brought together")
        if not answer.differences:
            answer.coverage = NOTHING_COMPARED


def _doubt_own_sum(
    found: list[Difference],
    entries: ComparedParts,
    local: Mapping[str, Mapping[int, Array]],
    ranks: list[int],
    answer: _Answer,
) -> list[Difference]:
    """Lower the confidence of what a script may have meant: other weights of ranks, a loss that is divided before."""
    if any(one.kind is ErrorKind.UNKNOWN for one in found):
        gradients = {name: parts[0].array for name, parts in entries.compared.items()}
        weights = find_weights(gradients, local, ranks, 1e-3)
        if weights is not None:
            written = [f"rank {rank} {write_ratio(weight)}" for rank, weight in weights.weights.items()]
            figures = ", ".join(written)
            answer.leave_out(f"gradients: ranks weigh differently in them ({figures}), which may be meant")
            return []
    doubted = []
    for one in found:
        if one.kind in (ErrorKind.FACTOR, ErrorKind.UNKNOWN, ErrorKind.REDUCED_TWICE):
            one = msgspec.structs.replace(
                one,
                evidence=f"{one.evidence}, if the loss is not scaled on purpose",
                confidence="medium",
            )
        doubted.append(one)
    return doubted
