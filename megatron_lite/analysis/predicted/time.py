"""The shortest step that the hardware allows beside the real one."""

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.kernels.figures import Role
from megatron_lite.analysis.predicted.figures import Compared, ComparedTime
from megatron_lite.estimate.prediction import TimePrediction

PRODUCTS = (Role.GEMM, Role.ATTENTION)
BOUNDS = ("compute", "memory", "link")


def compared_time(facts: Facts, predicted: TimePrediction) -> tuple[ComparedTime | None, list[str]]:
    """(the comparison, why there is none)."""
    run = facts.run
    if run.steady_step_ms is None:
        return None, ["no ordinary step was timed: nothing to hold the predicted step against."]
    tokens = run.tokens_per_second
    return ComparedTime(
        gpu=predicted.gpu,
        step=Compared("step", predicted.step_ms, run.steady_step_ms),
        tokens=Compared("tokens per second", predicted.tokens_per_s, tokens) if tokens else None,
        parts=_parts(facts, predicted),
        not_predicted=predicted.notes,
    ), []


def _parts(facts: Facts, predicted: TimePrediction) -> tuple[Compared, ...]:
    """A step of the trace by what bounds its parts; what neither computes nor sends is lost altogether."""
    one = facts.critical
    if one is None or not one.time.on_gpu or not one.time.step_ms:
        return ()
    least = {bound: sum(row.ms for row in predicted.rows if row.bound == bound) for bound in BOUNDS}
    computing, sending = (one.time.rows.get(row, 0.0) for row in ("compute", "exposed_communication"))
    products = min(computing, sum(one.kernels.roles.get(role, 0.0) for role in PRODUCTS))
    return (
        Compared("matrix products, attention", least["compute"], products),
        Compared("all other computing", least["memory"], computing - products),
        Compared("communication that nothing hides", least["link"], sending),
        Compared("not computing", 0.0, one.time.step_ms - computing - sending),
    )
