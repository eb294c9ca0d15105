"""Which kernels a run computes with, as far as its last bits depend on it: kept in checkpoints, so that a resumed run can tell."""

from collections.abc import Iterator, Mapping

from torch import nn

from megatron_lite.config.plan import Plan

ATTENTION_FLAGS = {
    "sdpa flash": "flash",
    "sdpa cudnn": "fused",
    "explicit": "unfused",
}  # by what Attend calls its kernel


def kernels_of(plan: Plan, model: nn.Module) -> dict[str, str]:
    """{"attention": "sdpa flash", "torch_compile": "layers"}."""
    return {"attention": model.decoder.layers[0].self_attention.attend.name, "torch_compile": plan.compilation.target}


def other_kernels(saved: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A line for each that differs, with the flag that goes on as before. `saved`: {} of a checkpoint that does not say it."""
    flags = {
        "attention": f"--attention-backend {ATTENTION_FLAGS.get(saved.get('attention'), 'auto')}",
        "torch_compile": f"--torch-compile {saved.get('torch_compile')}",
    }
    names = {"attention": "attention", "torch_compile": "torch.compile"}
    for what, flag in flags.items():
        if what in saved and saved[what] != now[what]:
            yield (
                f"{names[what]} was {saved[what]} and is {now[what]}: losses may differ in their last digits from those of "
                f"an uninterrupted run; {flag} goes on as before."
            )
