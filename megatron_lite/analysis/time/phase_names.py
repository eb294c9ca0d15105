"""Which phase of a step a range's name means: the trainer's own names, and what other people call the same."""

import re

from megatron_lite.phases import Phase

OTHER_NAMES = {
    Phase.DATA: (
        "dataloader",
        "data_loader",
        "data_loading",
        "load_data",
        "load_batch",
        "get_batch",
        "next_batch",
        "batch_generator",
        "wait_for_batch",
        "fetch_batch",
        "dataload",
    ),
    Phase.DATA_TO_DEVICE: ("to_device", "h2d", "copy_batch_to_gpu", "batch_to_device", "data_to_gpu", "copy_to_device"),
    Phase.FORWARD: ("fwd", "forward_pass", "forward_compute", "forward_step"),
    Phase.BACKWARD: ("bwd", "backward_pass", "backward_compute", "backward_step"),
    Phase.GRAD_SYNC: ("all_reduce_gradients", "allreduce_gradients", "sync_gradients", "grads_all_reduce"),
    Phase.CLIP_GRAD: ("clip_grad_norm", "grad_clip", "clip_gradients"),
    Phase.OPTIMIZER_STEP: ("optimizer", "optim", "opt", "opt_step", "optim_step", "optimizer_update"),
    Phase.EVAL: ("evaluate", "evaluation", "validation", "validate"),
    Phase.SAVE: ("checkpoint", "save_checkpoint", "checkpointing"),
}
PHASE_OF_NAME = {str(phase): phase for phase in Phase} | {
    name: phase for phase, names in OTHER_NAMES.items() for name in names
}
PHASE_OF_PATTERN = (  # what PyTorch itself emits
    (re.compile(r"enumerate\(DataLoader\)"), Phase.DATA),
    (re.compile(r"Optimizer\.step#"), Phase.OPTIMIZER_STEP),
    (re.compile(r"(Distributed|FullySharded)DataParallel\.forward"), Phase.FORWARD),
)
ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")  # PyTorch's too: a phase of its own, whatever range it is called in
DECORATION = " \t#=-*<>[]"


def known_phase(name: str) -> Phase | None:
    """The phase that a range with this name is; None if the name means none."""
    for pattern, phase in PHASE_OF_PATTERN:
        if pattern.match(name):
            return phase
    plain = name.strip(DECORATION).lower().replace("-", "_").replace(" ", "_")
    return PHASE_OF_NAME.get(plain)


def phase_label(name: str) -> str:
    """What a report calls the range: the trainer's name for it where there is one, else its own without decoration."""
    phase = known_phase(name)
    return str(phase) if phase else name.strip(DECORATION).partition("#")[0].strip() or name
