"""What a step went wrong by, from made records of its attempts."""

import msgspec
import pytest

from megatron_lite.analysis.replay.attempts import ReplayInput, find_difference
from megatron_lite.analysis.replay.conclude import conclude
from megatron_lite.formats.replay_record import (
    AttemptKind,
    AttemptRecord,
    LoggedStep,
    ModuleRecord,
    RankRecord,
    ReplayedStep,
    SequenceRecord,
    WeightRecord,
)
from megatron_lite.formats.replay_report import ReplayCause

STEP = 10
STARTED_AT = 4
WATCHED = ("forward a", "forward b", "backward b")
SOUND = (1.0, 0.5)
SPIKE = (9.0, 0.5)
BROKEN = (None, None)


def logged(at_step=SOUND, first=1):
    steps = [LoggedStep(iteration=number, loss=1 + 0.01 * number, grad_norm=0.5) for number in range(first, STEP)]
    if at_step is not None:
        loss, norm = at_step
        steps.append(LoggedStep(iteration=STEP, loss=loss, grad_norm=norm, skipped=loss is None))
    return tuple(steps)


def steps(at_step, last_bits=(1, 2, 3)):
    found = [
        ReplayedStep(iteration=number, loss=1 + 0.01 * number, grad_norm=0.5, checksums=(1, 2, 3))
        for number in range(STARTED_AT + 1, STEP)
    ]
    loss, norm = at_step
    found.append(
        ReplayedStep(iteration=STEP, loss=loss, grad_norm=norm, skipped=loss is None, checksums=tuple(last_bits))
    )
    return tuple(found)


def attempt(kind, at_step, **others):
    if kind in (AttemptKind.FIRST, AttemptKind.SECOND, AttemptKind.THIRD):
        return AttemptRecord(kind=kind, steps=steps(at_step, others.pop("bits", (1, 2, 3))), watched=WATCHED, **others)
    return AttemptRecord(kind=kind, steps=steps(at_step)[-1:], **others)


def sequence(row, loss, share=0.1):
    return SequenceRecord(
        data_rank=0, micro_batch=0, row=row, sample=row, loss_sum=loss * 10, labels=10, top_share=share
    )


def judge(at_step, *others, then=None, sequences=(), suspects=(), rank=None, second=None, **known):
    """Two equal replays of a step and other attempts, beside a run that logged the same."""
    fields = {"precision": "fp32", "update_ratio": 0.002, "rate": 1e-3, **(rank or {})}
    first = attempt(AttemptKind.FIRST, at_step, sequences=tuple(sequences), **known.pop("first", {}))
    again = second or attempt(AttemptKind.SECOND, at_step)
    record = RankRecord(
        rank=0, ranks=1, started_at=STARTED_AT, attempts=(first, again, *others), suspects=tuple(suspects), **fields
    )
    known.setdefault("logged", logged(at_step if then is None else then))
    return conclude(ReplayInput(run="run", step=STEP, records=[record], started_from="a checkpoint", **known))


def test_a_step_like_others_has_nothing_wrong():
    report = judge(SOUND)
    assert (report.cause, report.confidence) == (ReplayCause.NOTHING, "high")
    assert [row.failure for row in report.figures] == ["", "", ""]


def test_a_step_that_was_not_logged_lowers_confidence():
    assert judge(SOUND, logged=logged(None)).confidence == "medium"


def test_too_few_steps_before_it_lower_confidence():
    """Of two steps no spike can be told."""
    first = attempt(AttemptKind.FIRST, SOUND)
    alone = {kind: msgspec.structs.replace(first, kind=kind, steps=first.steps[-2:]) for kind in AttemptKind}
    record = RankRecord(
        rank=0, ranks=1, started_at=STEP - 2, attempts=(alone[AttemptKind.FIRST], alone[AttemptKind.SECOND])
    )
    report = conclude(
        ReplayInput(run="run", step=STEP, logged=logged(first=STEP - 1), records=[record], started_from="")
    )
    assert (report.cause, report.confidence) == (ReplayCause.NOTHING, "medium") and report.alternatives


def test_without_the_sequence_that_stands_out_it_passes():
    sequences = [sequence(0, 30.0, share=0.9), *(sequence(row, 1.0) for row in range(1, 4))]
    without = attempt(AttemptKind.WITHOUT, SOUND)
    report = judge(SPIKE, without, sequences=sequences, suspects=[(0, 0, 0)], load="--load save --ckpt-step 4")
    assert (report.cause, report.confidence) == (ReplayCause.DATA, "high")
    assert "--iterations-to-skip 10" in report.remedies[0] and "--load save --ckpt-step 4" in report.remedies[0]
    assert [one.row for one in report.sequences] == [0] and report.sequences[0].is_suspect


def test_half_the_rate_lowers_what_the_data_says():
    half = attempt(AttemptKind.LOWER_RATE, SOUND, rate=0.5)
    report = judge(
        SPIKE, attempt(AttemptKind.WITHOUT, SOUND), half, sequences=[sequence(0, 30.0)], suspects=[(0, 0, 0)]
    )
    assert (report.cause, report.confidence) == (ReplayCause.DATA, "medium") and report.alternatives


NONFINITE = ModuleRecord(module="b", direction="forward", largest=6e4, nonfinite=3, values=8, micro_batch=1)


@pytest.mark.parametrize(("in_fp32", "cause"), [(SOUND, "numerics"), (SPIKE, "unknown"), (BROKEN, "unknown")])
def test_what_fp32_says(in_fp32, cause):
    fp32 = attempt(AttemptKind.FP32, in_fp32)
    report = judge(BROKEN, fp32, rank={"precision": "fp16"}, first={"modules": (NONFINITE,)})
    assert report.cause.value == cause
    assert report.places[0].module == "b" and report.places[0].ranks == (0,)
    assert (report.confidence == "high") == (cause == "numerics")


def test_fp32_and_the_data_both_is_not_certain():
    others = [attempt(AttemptKind.FP32, SOUND), attempt(AttemptKind.WITHOUT, SOUND)]
    sequences = [sequence(0, 30.0), sequence(1, 1.0)]
    report = judge(BROKEN, *others, rank={"precision": "fp16"}, sequences=sequences, suspects=[(0, 0, 0)])
    assert (report.cause, report.confidence) == (ReplayCause.NUMERICS, "medium")


def test_a_scale_that_was_too_high_for_a_moment_is_meant():
    overflow = (1.0, None)
    first = attempt(AttemptKind.FIRST, overflow)
    scaled = tuple(msgspec.structs.replace(one, loss_scale=65536.0) for one in first.steps)
    rank = {"precision": "fp16", "scales_dynamically": True}
    records = [
        RankRecord(
            rank=0,
            ranks=1,
            started_at=STARTED_AT,
            attempts=(
                msgspec.structs.replace(first, steps=scaled),
                msgspec.structs.replace(first, kind=AttemptKind.SECOND, steps=scaled),
                attempt(AttemptKind.FP32, SOUND),
            ),
            **rank,
        )
    ]
    known = ReplayInput(run="run", step=STEP, logged=logged(overflow), records=records, started_from="")
    assert conclude(known).cause is ReplayCause.NOTHING


@pytest.mark.parametrize(("ratio", "confidence"), [(0.2, "high"), (0.001, "medium"), (None, "medium")])
def test_lower_rates(ratio, confidence):
    others = [attempt(AttemptKind.LOWER_RATE, SPIKE, rate=0.5), attempt(AttemptKind.LOWER_RATE, SOUND, rate=0.125)]
    report = judge(SPIKE, *others, rank={"update_ratio": ratio})
    assert (report.cause, report.confidence) == (ReplayCause.RATE, confidence)
    assert "0.125" in report.sentence


def test_an_earlier_step_that_went_wrong_is_named():
    lower = attempt(AttemptKind.LOWER_RATE, SOUND, rate=0.5)
    first = attempt(AttemptKind.FIRST, SPIKE)
    spoiled = [*first.steps]
    spoiled[2] = msgspec.structs.replace(spoiled[2], loss=5.0)
    first = msgspec.structs.replace(first, steps=tuple(spoiled))
    records = [
        RankRecord(
            rank=0,
            ranks=1,
            started_at=STARTED_AT,
            update_ratio=0.5,
            attempts=(first, msgspec.structs.replace(first, kind=AttemptKind.SECOND), lower),
        )
    ]
    report = conclude(ReplayInput(run="run", step=STEP, logged=logged(None)[:4], records=records, started_from=""))
    assert report.confidence == "medium" and any("--step 7" in text for text in report.alternatives)


def test_weights_out_of_proportion():
    weights = [WeightRecord(name=f"layers.{number}.fc1.weight", rms=0.02) for number in range(3)]
    weights.append(WeightRecord(name="layers.3.fc1.weight", rms=2e9))
    report = judge(BROKEN, rank={"weights": tuple(weights)}, first={"modules": (NONFINITE,)})
    assert (report.cause, report.confidence) == (ReplayCause.NUMERICS, "medium")
    assert "layers.3.fc1.weight" in report.evidence[0]


def test_nothing_that_was_tried_helps():
    report = judge(SPIKE, AttemptRecord(kind=AttemptKind.WITHOUT, left_out="nothing stands out"))
    assert (report.cause, report.confidence) == (ReplayCause.UNKNOWN, "low") and report.not_tested


# --- bits


@pytest.mark.parametrize("odd", ["first", "second"])
@pytest.mark.parametrize(("deterministic", "confidence"), [(True, "high"), (False, "medium")])
def test_of_three_replays_one_differs(odd, deterministic, confidence):
    flipped = (1, 7, 8)
    own = {"bits": flipped} if odd == "first" else {}
    second = attempt(AttemptKind.SECOND, SOUND, bits=flipped if odd == "second" else (1, 2, 3))
    third = attempt(AttemptKind.THIRD, SOUND)
    report = judge(SOUND, third, first=own, second=second, rank={"is_deterministic": deterministic})
    assert (report.cause, report.confidence) == (ReplayCause.HARDWARE, confidence)
    assert "forward b" in report.sentence


def test_three_replays_that_all_differ_are_no_hardware():
    second = attempt(AttemptKind.SECOND, SOUND, bits=(1, 7, 8))
    third = attempt(AttemptKind.THIRD, SOUND, bits=(1, 9, 9))
    report = judge(SOUND, third, second=second)
    assert (report.cause, report.confidence) == (ReplayCause.UNKNOWN, "low")


def test_the_rank_that_differs_first_in_the_order_of_the_step():
    """Rank 0 has the first stage, whose backward comes last."""
    records = []
    for rank, bits in ((0, (1, 2, 9)), (1, (1, 2, 8))):
        attempts = (attempt(AttemptKind.FIRST, SOUND), attempt(AttemptKind.SECOND, SOUND, bits=bits))
        records.append(RankRecord(rank=rank, ranks=2, pipeline_rank=rank, attempts=attempts))
    found = find_difference(records, AttemptKind.FIRST, AttemptKind.SECOND)
    assert (found.what, found.ranks, found.step) == ("backward b", (1,), STEP)


@pytest.mark.parametrize(
    ("first", "known", "cause", "confidence"),
    [
        (1, {}, "hardware", "high"),
        # one logged step before it is not enough
        (STEP - 1, {}, "hardware", "medium"),
        (STEP, {}, "unknown", "low"),
        (1, {"other_bits": "torch was 1 and is 2"}, "unknown", "low"),
        (1, {"other_order": "sums over 4 ranks"}, "hardware", "medium"),
    ],
)
def test_a_step_that_is_sound_where_it_runs_again(first, known, cause, confidence):
    report = judge(SOUND, logged=logged(BROKEN, first), **known)
    assert (report.cause.value, report.confidence) == (cause, confidence)


def test_a_step_that_goes_wrong_only_here():
    report = judge(SPIKE, attempt(AttemptKind.LOWER_RATE, SOUND, rate=0.5), then=SOUND)
    assert (report.cause, report.confidence) == (ReplayCause.UNKNOWN, "low")


def test_other_kernels_lower_confidence_only():
    """From the first step on figures differ a little."""
    other = tuple(msgspec.structs.replace(one, loss=one.loss * 1.00001) for one in logged())
    report = judge(SOUND, logged=other)
    assert (report.cause, report.confidence) == (ReplayCause.NOTHING, "medium")


def test_a_silent_difference_behind_equal_bits_is_hardware_with_doubt():
    other = tuple(
        msgspec.structs.replace(one, loss=one.loss * 1.00001) if one.iteration == STEP else one for one in logged()
    )
    report = judge(SOUND, logged=other)
    assert (report.cause, report.confidence) == (ReplayCause.HARDWARE, "medium")
    report = judge(SOUND, logged=other, other_order="sums over 4 ranks")
    assert (report.cause, report.confidence) == (ReplayCause.NOTHING, "medium")
