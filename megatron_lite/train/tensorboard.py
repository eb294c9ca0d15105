"""TensorBoard's event file under Megatron-LM's names."""

import dataclasses
import math

from megatron_lite.config.plan import Plan
from megatron_lite.train.console import compute_timers, perplexity
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.train.step_metrics import StepFigures


class TensorBoard:
    """Written by the last rank only."""

    def __init__(self, plan: Plan):
        from torch.utils.tensorboard import SummaryWriter  # runs without --tensorboard-dir do without its packages

        w = plan.args.watch
        self.plan = plan
        self._writer = SummaryWriter(log_dir=w.tensorboard_dir, max_queue=w.tensorboard_queue_size)
        for group in dataclasses.asdict(plan.args).values():
            for name, value in group.items():
                self._writer.add_text(name, str(value))

    def step(self, f: StepFigures, seconds: float | None):
        """One step's scalars, over iterations and over samples. `seconds`: None for a profiled step."""
        w = self.plan.args.watch
        if f.iteration % w.tensorboard_log_interval:
            return
        scalars = {
            "learning-rate": f.next_lr,
            "batch-size": f.batch_size,
            "lm loss": f.loss,
            "loss-scale": f.next_loss_scale if w.log_loss_scale_to_tensorboard else None,
            "grad-norm": None if f.skipped else f.grad_norm,
            "num-zeros": f.zeros if w.log_num_zeros_in_grad else None,
            "params-norm": f.params_norm if w.log_params_norm else None,
            "world-size": self.plan.world.size if w.log_world_size_to_tensorboard else None,
            "iteration-time": seconds if w.log_timers_to_tensorboard else None,
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, f.iteration)
                self._writer.add_scalar(f"{name} vs samples", value, f.consumed)

    def interval(self, iteration: int, scalars: dict[str, float]):
        """Scalars of a whole interval: throughput, phase times."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)

    def ranks(self, iteration: int, f: RankFigures):
        """Times and memory of an interval. Megatron's NAME-time is the slowest rank's, in seconds per iteration."""
        w, scalars = self.plan.args.watch, {}
        if w.log_timers_to_tensorboard:
            for name, times in compute_timers(f.mean_ms).items():
                scalars |= {f"{name}-time": max(times) / 1000, f"{name}-time-min": min(filter(None, times)) / 1000}
        if w.log_memory_to_tensorboard:
            most = {"host-memory-bytes": f.host_memory_bytes, "mem-step-peak-bytes": f.peak_memory_bytes}
            scalars |= {name: max(values) for name, values in most.items() if not any(map(math.isnan, values))}
        self.interval(iteration, scalars)

    def memory(self, iteration: int, stats: dict[str, int]):
        """The allocator's counters, as of torch.cuda.memory_stats()."""
        names = {
            "mem-reserved-bytes": "reserved_bytes.all.current",
            "mem-allocated-bytes": "allocated_bytes.all.current",
            "mem-max-allocated-bytes": "allocated_bytes.all.peak",
            "mem-allocated-count": "allocation.all.current",
        }
        self.interval(iteration, {name: stats[key] for name, key in names.items()})

    def evaluation(self, which: str, loss: float, iteration: int, consumed: int):
        """'validation' or 'test' loss, and its perplexity if asked for. Megatron has one name for both, ours beside it."""
        scalars = {}
        for kind in dict.fromkeys(("validation", which)):
            scalars[f"lm loss {kind}"] = loss
            if self.plan.args.watch.log_validation_ppl_to_tensorboard:
                scalars[f"lm loss {kind} ppl"] = perplexity(loss)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(f"{name} vs samples", value, consumed)

    def flush(self):
        """Everything so far to disk."""
        self._writer.flush()

    def close(self):
        self._writer.close()
