"""Concludes from the attempts at a step what it went wrong by: data, numerics, learning rate, hardware, or unknown."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_lite.analysis.replay.attempts import (
    BitDifference,
    ReplayInput,
    Reproduction,
    compare_with_log,
    find_difference,
)
from megatron_lite.analysis.replay.places import find_large_weights, list_places
from megatron_lite.formats.replay_record import (
    AttemptKind,
    AttemptRecord,
    LoggedStep,
    RankRecord,
    ReplayedStep,
    SequenceRecord,
)
from megatron_lite.formats.replay_report import (
    ReplayCause,
    ReplayDocument,
    ReplayFigures,
    ReplayPlace,
    ReplayReport,
    ReplaySequence,
)
from megatron_lite.step_failure import MIN_STEPS_BEFORE, describe_failure, describe_loss_spike, list_sound
from megatron_lite.units import counted, significant

HIGH = "high"
MEDIUM = "medium"
LOW = "low"
MAX_SEQUENCES = 4  # that are shown
MIN_EQUAL_STEPS = 3  # that make sure that a machine gives the run's bits
MIN_UPDATE = 0.01  # norm of an update, over that of the weights, that a training does not take for long
WILD_UPDATE = 0.5  # likewise, that leaves little of them
FIRST_RATE = 0.5  # the mildest of the lower rates
TITLES = {
    AttemptKind.FIRST: "first replay",
    AttemptKind.SECOND: "second replay",
    AttemptKind.THIRD: "third replay",
    AttemptKind.FP32: "in fp32",
    AttemptKind.WITHOUT: "without those sequences",
    AttemptKind.LOWER_RATE: "at a lower rate",
}


@dataclass
class Conclusion:
    """A cause, and what speaks for it."""

    cause: ReplayCause
    confidence: str
    sentence: str
    evidence: list[str] = field(default_factory=list)
    alternatives: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepFacts:
    """Facts that the attempts at a step have shown.

    Attributes:
        known: What is known of it.
        steps: The step in each attempt, by kind; of lower rates the mildest that passes, else the last.
        failures: What went wrong in each of them; "": nothing.
        logged: The step as logged; None: it was not.
        logged_failure: What went wrong in it.
        reproduction: How far the replay that counts gives what was logged.
        difference: Where the first two replays differ; None: nowhere.
        before: Steps that the step is compared with.
        places: First modules that show something.
        suspects: Sequences that stand out.
        large_weights: Weights out of proportion.
        passing_rate: The mildest lower rate at which the step passes; None: none does, or none was tried.
    """

    known: ReplayInput
    steps: dict[AttemptKind, ReplayedStep]
    failures: dict[AttemptKind, str]
    logged: LoggedStep | None
    logged_failure: str
    reproduction: Reproduction
    difference: BitDifference | None
    before: Sequence[LoggedStep | ReplayedStep]
    places: list[ReplayPlace]
    suspects: list[SequenceRecord]
    large_weights: list[str]
    passing_rate: float | None

    def passes(self, kind: AttemptKind) -> bool:
        """Whether the step was run in a way, and nothing went wrong."""
        return self.failures.get(kind) == ""

    @property
    def failure(self) -> str:
        """The failure of the first replay; "": nothing went wrong."""
        return self.failures[AttemptKind.FIRST]

    @property
    def record(self) -> RankRecord:
        """The record of the first rank."""
        return self.known.records[0]

    @property
    def first(self) -> ReplayedStep:
        """The step in the first replay."""
        return self.steps[AttemptKind.FIRST]

    @property
    def updates(self) -> int:
        """Updates between the attempts' start and the step."""
        return self.known.step - 1 - self.record.started_at

    @property
    def is_deterministic(self) -> bool:
        """Whether the device gives the same bits each time."""
        return self.record.is_deterministic

    @property
    def gives_run_bits(self) -> bool:
        """Whether sound hardware gives the run's bits, as far as is known."""
        return self.is_deterministic and not self.known.other_bits and not self.known.other_order

    @property
    def first_output(self) -> ReplayPlace | None:
        """The first module whose output shows something."""
        return next((place for place in self.places if "output" in place.what), None)


def conclude(known: ReplayInput) -> ReplayReport:
    """Conclude what a step went wrong by.

    Args:
        known: Its attempts, and what was logged.
    """
    facts = gather_facts(known)
    found = _judge(facts)
    found.remedies += _list_remedies(facts, found)
    attempt = known.find_attempt(AttemptKind.FIRST)
    sequences = attempt.sequences if attempt is not None else ()
    return ReplayReport(
        run=known.run,
        step=known.step,
        cause=found.cause,
        confidence=found.confidence,
        sentence=found.sentence,
        evidence=tuple(found.evidence),
        alternatives=tuple(found.alternatives),
        remedies=tuple(found.remedies),
        started_from=known.started_from,
        figures=tuple(_list_figures(facts)),
        places=tuple(facts.places),
        sequences=tuple(_choose_sequences(sequences, facts.suspects)),
        batch=len(sequences),
        not_tested=tuple(_list_not_tested(facts)),
        notes=known.notes,
    )


def gather_facts(known: ReplayInput) -> StepFacts:
    """Gather what the attempts have shown. The argument is that of `conclude`."""
    first = known.find_attempt(AttemptKind.FIRST)
    assert first is not None, "a record without a failure has a first attempt"
    before = _list_before(known, first)
    steps = _choose_steps(known, before)
    failures = {kind: describe_failure(step, before) for kind, (step, _) in steps.items()}
    passing_rate = None
    if failures.get(AttemptKind.LOWER_RATE) == "":
        passing_rate = steps[AttemptKind.LOWER_RATE][1]
    logged = next((one for one in known.logged if one.iteration == known.step), None)
    logged_failure = ""
    if logged is not None:
        logged_failure = describe_failure(logged, before)
    sound = _choose_sound(known, first)
    places = set(known.records[0].suspects)
    return StepFacts(
        known=known,
        steps={kind: step for kind, (step, _) in steps.items()},
        failures=failures,
        logged=logged,
        logged_failure=logged_failure,
        reproduction=compare_with_log(sound, known.logged),
        difference=find_difference(known.records, AttemptKind.FIRST, AttemptKind.SECOND),
        before=before,
        places=list_places(known.records),
        suspects=[one for one in first.sequences if (one.data_rank, one.micro_batch, one.row) in places],
        large_weights=list(find_large_weights(known.records)),
        passing_rate=passing_rate,
    )


def _list_before(known: ReplayInput, first: AttemptRecord) -> list[LoggedStep | ReplayedStep]:
    """List the steps that the step is compared with: as logged, or as replayed where fewer were."""
    logged = [one for one in known.logged if one.iteration < known.step]
    replayed = [one for one in first.steps if one.iteration < known.step]
    if len(logged) < len(replayed):
        return list(replayed)
    return list(logged)


def _choose_steps(
    known: ReplayInput, before: Sequence[LoggedStep | ReplayedStep]
) -> dict[AttemptKind, tuple[ReplayedStep, float]]:
    """Choose the step of each kind of attempt, and its rate: of lower rates the first that passes, else the last.

    Args:
        known: The attempts.
        before: Steps that the step is compared with.
    """
    steps: dict[AttemptKind, tuple[ReplayedStep, float]] = {}
    has_passed = False
    for attempt in known.records[0].attempts:
        is_lower = attempt.kind is AttemptKind.LOWER_RATE
        if not attempt.steps or (is_lower and has_passed):
            continue
        step = attempt.steps[-1]
        steps[attempt.kind] = (step, attempt.rate)
        has_passed = is_lower and not describe_failure(step, before)
    return steps


def _choose_sound(known: ReplayInput, first: AttemptRecord) -> AttemptRecord:
    """Choose the replay that counts: where the first two differ, the one that the third agrees with."""
    second = known.find_attempt(AttemptKind.SECOND)
    is_odd = find_difference(known.records, AttemptKind.FIRST, AttemptKind.THIRD) is not None
    agrees = find_difference(known.records, AttemptKind.SECOND, AttemptKind.THIRD) is None
    has_third = known.find_attempt(AttemptKind.THIRD) is not None
    return second if second is not None and has_third and is_odd and agrees else first


def _judge(facts: StepFacts) -> Conclusion:
    """Judge by what is most certain first: bits that differ, then figures that were not reproduced, then causes."""
    if facts.difference is not None:
        return _judge_difference(facts, facts.difference)
    if facts.reproduction.differs_at is not None:
        found = _judge_other_figures(facts)
        if found is not None:
            return found
    if not facts.failure:
        return _judge_healthy(facts)
    if _scale_was_too_high(facts):
        scale = facts.first.loss_scale or 0.0
        sentence = (
            f"gradients overflow at a loss scale of {scale:g}, which is lowered for it: the step is left out as meant"
        )
        return Conclusion(ReplayCause.NOTHING, MEDIUM, sentence, list(_describe_places(facts)))
    return _judge_failure(facts)


def _judge_difference(facts: StepFacts, difference: BitDifference) -> Conclusion:
    """Judge a step whose replays differ."""
    records = facts.known.records
    first_odd = find_difference(records, AttemptKind.FIRST, AttemptKind.THIRD)
    second_odd = find_difference(records, AttemptKind.SECOND, AttemptKind.THIRD)
    ranks = ", ".join(map(str, difference.ranks))
    ranks = f"rank {ranks}" if len(difference.ranks) == 1 else f"ranks {ranks}"
    where = f"in {difference.what} of iteration {difference.step} on {ranks}"
    if first_odd is not None and second_odd is not None:
        return Conclusion(
            ReplayCause.UNKNOWN,
            LOW,
            f"three replays give three results, which differ first {where}: the step is not deterministic here",
            alternatives=["hardware that fails often, or operations that add in any order"],
            remedies=["--deterministic-mode, and replay again"],
        )
    odd = "second"
    others = "first and third"
    if second_odd is None:
        odd = "first"
        others = "second and third"
    evidence = [f"the {others} replay agree in every bit that was looked at, and the {odd} differs first {where}"]
    confidence = HIGH
    alternatives = []
    if not facts.is_deterministic:
        confidence = MEDIUM
        alternatives = ["operations of this GPU that add in any order"]
    if facts.reproduction.compared and facts.reproduction.differs_at is None:
        equal = counted(facts.reproduction.equal_before, "logged step")
        evidence.append(f"the two that agree give the bits of {equal}")
    sentence = f"replays of the same step differ, first {where}: the machine that ran them computed wrongly once"
    return Conclusion(ReplayCause.HARDWARE, confidence, sentence, evidence, alternatives)


def _judge_other_figures(facts: StepFacts) -> Conclusion | None:
    """Judge a replay that agrees with itself and not with what was logged; None where that says nothing."""
    known = facts.known
    found = facts.reproduction
    at = found.differs_at
    is_exact = facts.gives_run_bits and found.equal_before >= MIN_EQUAL_STEPS
    changes_the_answer = bool(facts.failure) != bool(facts.logged_failure)
    if not (changes_the_answer or is_exact):
        # other kernels, threads or versions
        return None
    equal = counted(found.equal_before, "step")
    figures = f"{_describe_figures(found.logged)} was logged, {_describe_figures(found.replayed)} comes out"
    evidence = [
        "two replays agree with each other in every bit that was looked at",
        f"{equal} before iteration {at} give the logged bits, and iteration {at} does not: {figures}",
    ]
    changed = "flags, data or checkpoints that have changed since the run"
    if facts.failure and changes_the_answer:
        sentence = f"the step was logged as {_describe_figures(facts.logged)}, and goes wrong where it runs again"
        return Conclusion(ReplayCause.UNKNOWN, LOW, sentence, evidence, [changed])
    if known.other_bits or not found.equal_before:
        why = known.other_bits or "no step before it was logged to compare with"
        sentence = f"the run's iteration {at} went wrong, and the replay's does not, but its bits are not the run's"
        return Conclusion(ReplayCause.UNKNOWN, LOW, sentence, evidence, [f"hardware; {why}"])
    if not changes_the_answer:
        sentence = f"iteration {at} gives other bits where it runs again: the run's own machine computed wrongly once"
        return Conclusion(ReplayCause.HARDWARE, MEDIUM, sentence, evidence, [changed])
    sentence = f"iteration {at} is sound where it runs again: the run's own machine computed wrongly once"
    alternatives = [changed]
    if not is_exact:
        alternatives.insert(0, known.other_order or "operations that are not deterministic")
    return Conclusion(ReplayCause.HARDWARE, HIGH if is_exact else MEDIUM, sentence, evidence, alternatives)


def _describe_figures(step: LoggedStep | ReplayedStep | None) -> str:
    if step is None:
        return "nothing"
    loss = _write(step.loss, 6)
    norm = _write(step.grad_norm, 4)
    return f"loss {loss}, gradient norm {norm}"


def _write(value: float | None, digits: int) -> str:
    if value is None:
        return "NaN or Inf"
    return significant(value, digits)


def _judge_healthy(facts: StepFacts) -> Conclusion:
    """Judge a step in which nothing goes wrong."""
    step = facts.first
    evidence = ["two replays agree with each other in every bit that was looked at", *_describe_reproduction(facts)]
    confidence = HIGH if facts.logged is not None and facts.reproduction.differs_at is None else MEDIUM
    figures = _describe_figures(step)
    alternatives = []
    if facts.logged is None:
        alternatives = ["the run has not logged the step, which may have gone otherwise"]
    if facts.suspects:
        confidence = MEDIUM
        alternatives.append(f"data: {_describe_suspects(facts)} stands out, though the step does not")
    sentence = f"the step is like those before it: {figures}"
    before = len(list_sound(facts.before))
    if before < MIN_STEPS_BEFORE:
        confidence = MEDIUM
        sentence = f"the step's figures are numbers: {figures}"
        alternatives.append(f"a spike: {counted(before, 'step')} before it are too few to compare with")
    return Conclusion(ReplayCause.NOTHING, confidence, sentence, evidence, alternatives)


def _describe_reproduction(facts: StepFacts) -> Iterator[str]:
    found = facts.reproduction
    if found.compared and found.differs_at is None:
        steps = counted(found.compared, "replayed step")
        yield f"{steps} that the run has logged: each gives the logged bits"
    elif found.differs_at is not None:
        share = significant(found.largest_difference, 2)
        yield f"from iteration {found.differs_at} on figures differ from those logged, its loss by a share of {share}"


def _judge_failure(facts: StepFacts) -> Conclusion:
    """Judge a step that goes wrong each time: which change makes it pass."""
    by_precision = _passes_in_fp32(facts)
    by_data = facts.passes(AttemptKind.WITHOUT)
    base = [*_describe_reproduction(facts), *_describe_places(facts)]
    if by_precision and by_data:
        found = _judge_precision(facts)
        found.confidence = MEDIUM
        found.evidence.append("it passes without the sequences that stand out, too")
        found.alternatives.append(f"data: {_describe_suspects(facts)}")
    elif by_precision:
        found = _judge_precision(facts)
    elif by_data:
        found = _judge_data(facts)
    elif facts.passing_rate is not None and not _is_overflow(facts):
        found = _judge_rate(facts, facts.passing_rate)
    elif _is_overflow(facts) or facts.large_weights:
        found = _judge_overflow(facts)
    elif (facts.record.update_ratio or 0.0) > WILD_UPDATE:
        found = _judge_wild_update(facts)
    else:
        sentence = f"{facts.failure}, and no change that was tried makes it pass"
        found = Conclusion(ReplayCause.UNKNOWN, LOW, sentence, alternatives=_list_untested_causes(facts))
    found.evidence = [*found.evidence, *base]
    earlier = _find_earlier_failure(facts)
    if earlier is not None:
        found.alternatives.append(f"iteration {earlier}, which went wrong before it: --step {earlier} replays that")
    is_doubtful = earlier is not None or facts.reproduction.differs_at is not None
    if is_doubtful and found.confidence == HIGH:
        found.confidence = MEDIUM
    return found


def _find_earlier_failure(facts: StepFacts) -> int | None:
    """Find the first step between the attempts' start and the step that went wrong, as replayed."""
    attempt = facts.known.find_attempt(AttemptKind.FIRST)
    past = [one for one in facts.known.logged if one.iteration <= facts.record.started_at]
    before: list[LoggedStep | ReplayedStep] = list(past)
    for step in attempt.steps[:-1] if attempt is not None else ():
        if describe_failure(step, before):
            return step.iteration
        before.append(step)
    return None


def _passes_in_fp32(facts: StepFacts) -> bool:
    """Whether fp32 is enough for the step to go well.

    Where figures are NaN or Inf in 16 bits, those of fp32 need to be numbers, and the loss a usual one.
    """
    step = facts.steps.get(AttemptKind.FP32)
    if step is None or facts.passes(AttemptKind.FP32):
        return step is not None
    first = facts.first
    is_finite = first.loss is not None and first.grad_norm is not None
    if is_finite or step.loss is None or step.grad_norm is None:
        return False
    return not describe_loss_spike(step.loss, facts.before)


def _scale_was_too_high(facts: StepFacts) -> bool:
    """Whether only scaled gradients overflowed, which a dynamic loss scale answers by itself."""
    step = facts.first
    adapts = facts.record.scales_dynamically and (step.loss_scale or 0.0) > 1
    return adapts and step.loss is not None and step.grad_norm is None and facts.passes(AttemptKind.FP32)


def _is_overflow(facts: StepFacts) -> bool:
    """Whether a module's output is not finite though the weights before the step are out of proportion."""
    return bool(facts.large_weights) and facts.first_output is not None


def _describe_places(facts: StepFacts) -> Iterator[str]:
    for place in facts.places:
        ranks = ", ".join(map(str, place.ranks))
        yield f"{place.what}: {place.module} on rank {ranks} ({place.evidence})"


def _describe_suspects(facts: StepFacts) -> str:
    """Say which sequences stand out, and by what."""
    parts = []
    for one in facts.suspects[:MAX_SEQUENCES]:
        loss = _write(_average(one), 3)
        sample = f"sample {one.sample}"
        if one.sample is None:
            sample = f"row {one.row} of micro-batch {one.micro_batch}"
        parts.append(f"{sample} (loss {loss}, {one.top_share:.0%} of it one token)")
    return ", ".join(parts)


def _judge_precision(facts: StepFacts) -> Conclusion:
    precision = facts.record.precision
    sentence = f"{facts.failure} in {precision}, and has a usual value in fp32"
    first = facts.first_output
    if first is not None:
        sentence += f"; first at {first.module}"
    evidence = [f"in fp32, from the same weights, {_describe_figures(facts.steps[AttemptKind.FP32])}"]
    found = Conclusion(ReplayCause.NUMERICS, HIGH, sentence, evidence)
    if facts.large_weights:
        found.evidence += facts.large_weights
        found.alternatives.append("a checkpoint whose weights are damaged")
    if not facts.places:
        found.confidence = MEDIUM
    return found


def _judge_data(facts: StepFacts) -> Conclusion:
    sentence = f"{facts.failure} for the sake of {_describe_suspects(facts)}"
    others = _list_other_losses(facts)
    evidence = [f"without it, {_describe_figures(facts.steps[AttemptKind.WITHOUT])}"]
    if others:
        evidence.append(
            f"losses of the other sequences: {significant(min(others), 3)} to {significant(max(others), 3)}"
        )
    found = Conclusion(ReplayCause.DATA, HIGH, sentence, evidence)
    if facts.passing_rate == FIRST_RATE:
        found.confidence = MEDIUM
        found.alternatives.append("learning rate: at half of it the step passes, too")
    elif facts.passing_rate is None and AttemptKind.LOWER_RATE in facts.steps:
        found.evidence.append("it does not pass at lower learning rates")
    elif facts.passing_rate is not None:
        found.alternatives.append(f"learning rate: at {facts.passing_rate:g} of it the step passes, too")
    return found


def _list_other_losses(facts: StepFacts) -> list[float]:
    """List the losses of the sequences that do not stand out."""
    attempt = facts.known.find_attempt(AttemptKind.FIRST)
    sequences = attempt.sequences if attempt is not None else ()
    means = [_average(one) for one in sequences if one not in facts.suspects]
    return [mean for mean in means if mean is not None]


def _judge_rate(facts: StepFacts, rate: float) -> Conclusion:
    """Judge a step that passes where the updates before it were smaller."""
    record = facts.record
    updates = counted(facts.updates, "update")
    share = "half" if rate == FIRST_RATE else f"{rate:g}"
    sentence = f"{facts.failure}, and it passes at {share} of the learning rate over the {updates} before it"
    evidence = [f"at {rate:g} of the rate, {_describe_figures(facts.steps[AttemptKind.LOWER_RATE])}"]
    is_large = record.update_ratio is not None and record.update_ratio >= MIN_UPDATE
    if record.update_ratio is not None:
        evidence.append(f"the update before it changed the weights by {record.update_ratio:.2%} of their norm")
    is_tested = facts.record.precision == "fp32" or AttemptKind.FP32 in facts.steps
    is_certain = is_large and is_tested and not facts.suspects and not facts.large_weights
    found = Conclusion(ReplayCause.RATE, HIGH if is_certain else MEDIUM, sentence, evidence)
    if not is_large:
        found.alternatives.append("a batch before it that has spoiled the weights, whose update is smaller, too")
    if facts.large_weights:
        found.alternatives.append("weights out of proportion before the step")
    if facts.suspects:
        found.alternatives.append(f"data: {_describe_suspects(facts)} stands out")
    return found


def _judge_wild_update(facts: StepFacts) -> Conclusion:
    """Judge a step before which the weights were as good as replaced, at any rate that was tried."""
    ratio = facts.record.update_ratio or 0.0
    sentence = f"{facts.failure}, behind an update {ratio:.3g} times as large as the weights"
    alternatives = ["gradients of the step before that were wrong, which make such updates without clipping"]
    return Conclusion(ReplayCause.RATE, MEDIUM, sentence, alternatives=alternatives)


def _judge_overflow(facts: StepFacts) -> Conclusion:
    """Judge a step whose weights are out of proportion before it."""
    evidence = list(facts.large_weights)
    first = facts.first_output
    where = f", first at {first.module}" if first is not None else ""
    is_broken = first is not None and "finite" in first.what
    sentence = f"{facts.failure}: weights that are out of proportion before the step make outputs too large{where}"
    alternatives = ["a checkpoint whose weights are damaged, or hardware that has written them"]
    return Conclusion(ReplayCause.NUMERICS, MEDIUM if is_broken else LOW, sentence, evidence, alternatives)


def _list_untested_causes(facts: StepFacts) -> list[str]:
    causes = []
    if not facts.updates:
        causes.append("learning rate: no update lies between the checkpoint and the step; --from an earlier one tells")
    if not facts.suspects:
        causes.append("data: no sequence of the batch stands out from the others")
    return causes


def _list_not_tested(facts: StepFacts) -> Iterator[str]:
    """List what was not found out, and why."""
    for attempt in facts.record.attempts:
        if attempt.left_out:
            yield f"{TITLES[attempt.kind]}: {attempt.left_out}"
    for why in (facts.known.other_bits, facts.known.other_order):
        if why:
            yield f"the run's own bits: {why}"
    if not facts.updates and facts.failure:
        yield "outputs that leave their range: the step before was not run, as the checkpoint is from then"
    if facts.logged is None:
        yield "what was logged: the run's steps.jsonl has no such step"


def _list_remedies(facts: StepFacts, found: Conclusion) -> Iterator[str]:
    """List what to do about a cause, as flags."""
    step = facts.known.step
    load = facts.known.load
    go_on = f"go on by {load}" if load else "start the run again"
    if found.cause is ReplayCause.DATA:
        yield f"{go_on} --iterations-to-skip {step}, and mend or remove those documents"
    elif found.cause is ReplayCause.NUMERICS:
        if facts.record.precision == "fp16":
            yield f"{go_on} with --bf16 in the place of --fp16, whose range is that of fp32"
        yield f"--iterations-to-skip {step} leaves the step out, which comes again where the weights stay"
    elif found.cause is ReplayCause.RATE:
        rate = facts.record.rate
        lower = "" if rate is None else f" (this step's is {rate:.3g})"
        yield f"{go_on} with a lower --lr, or a longer warmup{lower}"
    elif found.cause is ReplayCause.HARDWARE:
        yield f"{go_on} on other hardware, and have checked what the step ran on"
    elif found.cause is ReplayCause.UNKNOWN:
        yield f"{go_on} --iterations-to-skip {step} leaves the step out"


def _list_figures(facts: StepFacts) -> Iterator[ReplayFigures]:
    """List the step's figures in each way of running it."""
    if facts.logged is not None:
        yield ReplayFigures(
            name="logged", loss=facts.logged.loss, grad_norm=facts.logged.grad_norm, failure=facts.logged_failure
        )
    for attempt in facts.record.attempts:
        title = TITLES[attempt.kind]
        if attempt.kind is AttemptKind.LOWER_RATE and attempt.steps:
            title = f"at {attempt.rate:g} of the rate"
        if not attempt.steps:
            continue
        step = attempt.steps[-1]
        failure = describe_failure(step, facts.before)
        yield ReplayFigures(name=title, loss=step.loss, grad_norm=step.grad_norm, failure=failure)


def _choose_sequences(
    sequences: Sequence[SequenceRecord], suspects: Sequence[SequenceRecord]
) -> Iterator[ReplaySequence]:
    """Choose the sequences to show: those that stand out, else those with the largest losses."""
    gradients = [one.gradient for one in sequences if one.gradient is not None]
    middle = statistics.median(gradients) if gradients else 0.0
    by_loss = sorted(sequences, key=lambda one: (one.is_finite, -(_average(one) or 0.0)))
    chosen = list(suspects) or by_loss
    for one in chosen[:MAX_SEQUENCES]:
        gradient = None
        if one.gradient is not None and middle:
            gradient = one.gradient / middle
        yield ReplaySequence(
            data_rank=one.data_rank,
            micro_batch=one.micro_batch,
            row=one.row,
            sample=one.sample,
            loss=_average(one),
            gradient=gradient,
            top_share=one.top_share,
            is_suspect=one in suspects,
            documents=tuple(_list_documents(one)),
        )


def _list_documents(record: SequenceRecord) -> Iterator[ReplayDocument]:
    """List the documents of a sequence, or its own text where none is known."""
    for piece in record.pieces:
        last = piece.offset + piece.tokens - 1
        where = f"document {piece.number} of {piece.prefix}, tokens {piece.offset} to {last}"
        yield ReplayDocument(where=where, loss=piece.loss, text=piece.text)
    if not record.pieces and record.text:
        yield ReplayDocument(where="", loss=_average(record), text=record.text)


def _average(record: SequenceRecord) -> float | None:
    """The mean loss of a sequence; None: not finite, or unknown."""
    if record.loss_sum is None or not record.labels:
        return None
    return record.loss_sum / record.labels
