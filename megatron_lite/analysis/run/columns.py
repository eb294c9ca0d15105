"""The steps of a run as columns, and which of them are ordinary."""

from dataclasses import dataclass

from megatron_lite.analysis.run.step_lines import number
from megatron_lite.phases import Phase

EVAL, SAVE = Phase.EVAL.value, Phase.SAVE.value


@dataclass(frozen=True)
class Columns:
    """An entry per step; the names are those of Run."""

    iterations: tuple[int, ...]
    step_ms: tuple[float, ...]
    training_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    batch_sizes: tuple[float, ...]
    consumed_samples: tuple[float, ...]
    next_lrs: tuple[float, ...]
    losses: tuple[float, ...]
    not_finite: tuple[bool, ...]
    grad_norms: tuple[float, ...]
    loss_scale: tuple[float, ...]
    host_memory_bytes: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]
    skipped: tuple[bool, ...]
    profiled: tuple[bool, ...]
    compiling: tuple[bool, ...]
    compile_ms: tuple[float, ...]  # of it, in compiling steps
    evaluating: tuple[bool, ...]
    saving: tuple[bool, ...]
    undisturbed: tuple[bool, ...]  # neither the first nor profiled, beside a profile or compiling

    @property
    def ordinary(self) -> tuple[bool, ...]:
        """Undisturbed, and neither evaluating nor saving."""
        return tuple(
            quiet and not (evaluates or saves)
            for quiet, evaluates, saves in zip(self.undisturbed, self.evaluating, self.saving)
        )


def columns_of(steps: list[dict]) -> Columns:
    """Of lines that passed step_lines.is_step."""
    phases, step_ms = _by_phase(steps, "phases_ms"), _numbers(steps, "ms")
    evaluating_ms, saving_ms = (phases.get(name, (0.0,) * len(steps)) for name in (EVAL, SAVE))
    marks = {name: _marks(steps, name) for name in ("profiled", "beside_profile", "compiling")}
    return Columns(
        iterations=tuple(step["iteration"] for step in steps),
        step_ms=step_ms,
        training_ms=tuple(
            max(ms - evaluating - saving, 0.0) for ms, evaluating, saving in zip(step_ms, evaluating_ms, saving_ms)
        ),
        gpu_ms=_numbers(steps, "gpu_ms"),
        phases_ms=phases,
        gpu_phases_ms=_by_phase(steps, "gpu_phases_ms"),
        batch_sizes=_numbers(steps, "batch_size"),
        consumed_samples=_numbers(steps, "consumed_samples"),
        next_lrs=_numbers(steps, "next_lr"),
        losses=_numbers(steps, "loss"),
        not_finite=tuple(map(_is_lost, steps)),
        grad_norms=_numbers(steps, "grad_norm"),
        loss_scale=_numbers(steps, "loss_scale"),
        host_memory_bytes=_numbers(steps, "host_memory_bytes"),
        peak_memory_bytes=_numbers(steps, "peak_memory_bytes"),
        skipped=_marks(steps, "skipped"),
        profiled=marks["profiled"],
        compiling=marks["compiling"],
        compile_ms=_numbers(steps, "compile_ms"),
        evaluating=tuple(ms > 0 for ms in evaluating_ms),
        saving=tuple(ms > 0 for ms in saving_ms),
        undisturbed=tuple(step["step"] > 1 and not any(odd) for step, *odd in zip(steps, *marks.values())),
    )


def _is_lost(step: dict) -> bool:
    """An update whose loss was NaN or Inf, for which JSON has null."""
    return "loss" in step and step.get("skipped") is not True and not number(step["loss"]) >= 0


def _numbers(steps: list[dict], name: str) -> tuple[float, ...]:
    return tuple(number(step.get(name)) for step in steps)


def _marks(steps: list[dict], name: str) -> tuple[bool, ...]:
    return tuple(step.get(name) is True for step in steps)


def _by_phase(steps: list[dict], name: str) -> dict[str, tuple[float, ...]]:
    """Milliseconds per step by phase, in the order in which phases first occur; 0 where a step has none."""
    rows = [row if isinstance(row := step.get(name), dict) else {} for step in steps]
    read = [{phase: ms for phase, value in row.items() if (ms := number(value)) >= 0} for row in rows]
    return {
        phase: tuple(row.get(phase, 0.0) for row in read) for phase in dict.fromkeys(p for row in read for p in row)
    }
