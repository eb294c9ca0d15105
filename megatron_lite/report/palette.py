"""Colors of the parts of time and memory, in every chart and table of the page; page.css gives each name its value."""

from megatron_lite.analysis.kernels.kernel_results import Role

BLUE = "var(--blue)"
ORANGE = "var(--orange)"
GREEN = "var(--green)"
VERMILION = "var(--vermilion)"
SKY = "var(--sky)"
PURPLE = "var(--purple)"
YELLOW = "var(--yellow)"
SLATE = "var(--slate)"
GREY = "var(--grey)"
PALE = "var(--pale)"
VIOLET = "var(--violet)"
BROWN = "var(--brown)"
INK = "var(--ink)"
HELD = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "master weights": GREEN,
    "moments": VIOLET,
    "activations": SKY,
    "logits and loss": PURPLE,
    "workspace": YELLOW,
    "communication": VERMILION,
    "gathered parameters": BROWN,
    "awaiting free": SLATE,
    "KV cache": ORANGE,
    "other": GREY,
    "before the record": PALE,
}
ROWS = {
    "compute": BLUE,
    "exposed_communication": VERMILION,
    "exposed_copy": ORANGE,
    "data_wait": PURPLE,
    "sync": YELLOW,
    "host": GREEN,
    "allocator": SLATE,
    "garbage_collector": GREY,
    "launch": SKY,
    "dependency": VIOLET,
    "save": BROWN,
    "cpu_optimizer": SLATE,
    "clip_grad": BROWN,
    "log": BROWN,
    "compile": VIOLET,
    "startup": SLATE,
    "graph_capture": SKY,
    "profiler": GREY,
    "process_wait": PURPLE,
    "unexplained": PALE,
}
ROLES = {
    Role.GEMM: BLUE,
    Role.ATTENTION: SKY,
    Role.STATE_SPACE: SKY,
    Role.NORM: PURPLE,
    Role.SOFTMAX: VIOLET,
    Role.ELEMENTWISE: GREEN,
    Role.REDUCTION: BROWN,
    Role.EMBEDDING: YELLOW,
    Role.OPTIMIZER: SLATE,
    Role.CAST_COPY: ORANGE,
    Role.CONVOLUTION: BLUE,
    Role.FUSED: SKY,
    Role.COMMUNICATION: VERMILION,
    Role.TRANSFER: PALE,
    Role.OTHER: GREY,
}
# by what a phase's name means: programs spell it in many ways
PHASES = {
    "data": ROWS["data_wait"],
    "data_to_device": SKY,
    "pipeline_wait": YELLOW,
    "forward": BLUE,
    "backward": GREEN,
    "grad_sync": VIOLET,
    "unscale": PALE,
    "clip_grad": ROWS["clip_grad"],
    "Optimizer.zero_grad": YELLOW,
    "optimizer_step": SLATE,
    "log": GREY,
    "eval": VIOLET,
    "save": ROWS["save"],
}
OTHER_PHASES = (YELLOW, VIOLET, SKY, BROWN, PALE, SLATE, GREEN, BLUE, GREY)
ACTIONS = {"forward": PHASES["forward"], "backward": PHASES["backward"], "weights": GREY}
