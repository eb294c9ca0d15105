"""Passes of a model inside the optimizer's own step are forward and backward, and the update is the rest."""

import pytest
from support.trace_maker import AUTOGRAD, MadeTrace, measure, place

ENGINE = "autograd::engine::evaluate_function: MmBackward0"
STEP = "Optimizer.step#AdamW.step"


def run_closure(made: MadeTrace, at: float, thread: int) -> None:
    """100 us forward, 10 us of Python, 200 us backward on `thread`, 10 us of Python."""
    made.op("aten::mm", at, at + 100, sequence=1)
    made.op(ENGINE, at + 110, at + 310, thread, sequence=1, forward_thread=1)


def run_update(made: MadeTrace, at: float) -> None:
    """100 us in 4 operators."""
    for index in range(4):
        made.op("aten::addcdiv_", at + 25 * index, at + 25 * index + 24)


@pytest.mark.parametrize("thread", [100, AUTOGRAD], ids=["one thread", "a thread of its own"])
@pytest.mark.parametrize("evaluations", [1, 3])
def test_a_closure_is_no_update(tmp_path, thread, evaluations):
    made = MadeTrace(device=None)
    for index in range(4):
        at = 2000.0 * index
        made.step(index, at, at + 1990)
        made.annotation(STEP, at + 10, at + 10 + 430 * evaluations)
        for evaluation in range(evaluations):
            run_closure(made, at + 10 + 430 * evaluation, thread)
            run_update(made, at + 10 + 430 * evaluation + 320)
    phases = {phase.name: phase for phase in measure(made, tmp_path).phases}
    assert phases["forward"].host_ms == pytest.approx(0.1 * evaluations)
    assert phases["backward"].host_ms == pytest.approx(0.2 * evaluations)
    assert phases["optimizer_step"].host_ms == pytest.approx(0.1 * evaluations, abs=0.015)
    assert phases["closure"].host_ms == pytest.approx(0.03 * evaluations, abs=0.015)


def test_kernels_of_a_closure_belong_to_its_passes(tmp_path):
    made = MadeTrace()
    for index in range(4):
        at = 2000.0 * index
        made.step(index, at, at + 1990)
        made.annotation(STEP, at + 10, at + 500)
        run_closure(made, at + 20, AUTOGRAD)
        run_update(made, at + 350)
        made.kernel("forward", at + 100, at + 400, at + 30)
        made.kernel("backward", at + 400, at + 1000, at + 200, thread=AUTOGRAD)
        made.kernel("update", at + 1000, at + 1100, at + 360)
    phases = {phase.name: phase for phase in measure(made, tmp_path).phases}
    found = {name: phases[name].device_ms for name in ("forward", "backward", "optimizer_step")}
    assert found == pytest.approx({"forward": 0.3, "backward": 0.6, "optimizer_step": 0.1})
    assert phases["optimizer_step"].host_ms < 0.2


def test_named_passes_inside_an_update(tmp_path):
    made = MadeTrace(device=None)
    for index in range(4):
        at = 1000.0 * index
        made.step(index, at, at + 990)
        made.annotation("[pl][profile][LightningModule]M.optimizer_step", at + 5, at + 905)
        made.annotation(STEP, at + 10, at + 900)
        made.annotation("[pl][profile][Strategy]DDPStrategy.training_step", at + 20, at + 220)
        made.op("aten::mm", at + 30, at + 200, sequence=1)
        made.annotation("[pl][profile][Strategy]DDPStrategy.backward", at + 230, at + 530)
        made.op(ENGINE, at + 240, at + 500, sequence=1, forward_thread=1)
        run_update(made, at + 600)
        run_update(made, at + 700)
    phases = {phase.name: phase.host_ms for phase in measure(made, tmp_path).phases}
    assert phases == pytest.approx(
        {"forward": 0.2, "backward": 0.3, "optimizer_step": 0.31, "closure": 0.09}, abs=0.012
    )


def near_misses() -> list:
    with_gradients = [("op", "aten::addcdiv_", 120, 180, {"sequence": 5})]
    in_backward = [
        ("op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 20, 95, AUTOGRAD),
        ("annotation", STEP, 30, 90, AUTOGRAD),
        ("op", "aten::addcdiv_", 40, 80, AUTOGRAD),
    ]
    other_loop = [
        ("op", "aten::add_", 110, 130),
        ("op", ENGINE, 105, 150, AUTOGRAD),
        ("op", "aten::add_", 160, 180),
    ]
    return [
        pytest.param([("annotation", STEP, 100, 200), *with_gradients], id="an update that records gradients"),
        pytest.param(in_backward, id="an update inside a backward pass"),
        pytest.param([("annotation", STEP, 100, 200), *other_loop], id="another thread's backward pass"),
    ]


@pytest.mark.parametrize("events", near_misses())
def test_updates_without_a_closure(tmp_path, events):
    made = MadeTrace(device=None).add_all(("step", 1, 0, 1000), *events)
    _, placing = place(made, tmp_path)
    assert "closure" not in placing.phases
    optimizer = placing.phases.index("optimizer_step")
    assert (placing.ranges.phase == optimizer).all()


def test_the_last_pass_of_a_window_ends_where_it_ends(tmp_path):
    made = MadeTrace(device=None).add_all(
        ("step", 1, 0, 1000),
        ("annotation", STEP, 10, 900),
        ("op", "aten::mm", 20, 120, {"sequence": 1}),
        ("op", ENGINE, 130, 330),
    )
    phases = {phase.name: phase.host_ms for phase in measure(made, tmp_path).phases}
    assert phases["closure"] < 0.03 and phases["optimizer_step"] == pytest.approx(0.57)
