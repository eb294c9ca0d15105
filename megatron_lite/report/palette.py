"""Which color a part of time or memory has, in every chart and table of the page; page.css gives each name its value."""

from collections.abc import Iterable
from zlib import crc32

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.time.range_names import find_meaning
from megatron_lite.analysis.time.time_results import NO_PHASE, ROW_TITLES

HUES = ("blue", "orange", "green", "vermilion", "sky", "purple", "yellow", "slate", "grey", "pale", "violet", "brown")
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, SLATE, GREY, PALE, VIOLET, BROWN = (
    f"var(--{hue})" for hue in HUES
)
INK = "var(--ink)"
HELD = {
    "parameters": BLUE, "gradients": ORANGE, "master weights": GREEN, "moments": VIOLET, "activations": SKY,
    "logits and loss": PURPLE, "workspace": YELLOW, "communication": VERMILION,
    "gathered parameters": BROWN, "awaiting free": SLATE, "KV cache": ORANGE, "other": GREY, "before the record": PALE,
}  # fmt: skip
ROWS = {
    "compute": BLUE, "exposed_communication": VERMILION, "exposed_copy": ORANGE, "data_wait": PURPLE, "sync": YELLOW,
    "host": GREEN, "allocator": SLATE, "garbage_collector": GREY, "launch": SKY, "dependency": VIOLET, "save": BROWN,
    "cpu_optimizer": SLATE, "clip_grad": BROWN, "log": BROWN, "compile": VIOLET, "startup": SLATE, "graph_capture": SKY,
    "profiler": GREY, "process_wait": PURPLE, "unexplained": PALE,
}  # fmt: skip
ROLES = {
    Role.GEMM: BLUE, Role.ATTENTION: SKY, Role.STATE_SPACE: SKY, Role.NORM: PURPLE, Role.SOFTMAX: VIOLET, Role.ELEMENTWISE: GREEN,
    Role.REDUCTION: BROWN, Role.EMBEDDING: YELLOW, Role.OPTIMIZER: SLATE, Role.CAST_COPY: ORANGE, Role.CONVOLUTION: BLUE,
    Role.FUSED: SKY, Role.COMMUNICATION: VERMILION, Role.TRANSFER: PALE, Role.OTHER: GREY,
}  # fmt: skip
# what a timeline shows beside phases has the color of the step's row
BESIDE_PHASES = {
    NO_PHASE: GREY, "communication": ROWS["exposed_communication"], "copies": ROWS["exposed_copy"],
    **{title: ROWS[row] for row, title in ROW_TITLES.items() if row in ROWS},
}  # fmt: skip
# by what a phase's name means: programs spell it in many ways
PHASES = {
    "data": ROWS["data_wait"], "data_to_device": SKY, "pipeline_wait": YELLOW, "forward": BLUE, "backward": GREEN,
    "grad_sync": VIOLET, "unscale": PALE, "clip_grad": ROWS["clip_grad"], "Optimizer.zero_grad": YELLOW,
    "optimizer_step": SLATE, "log": GREY, "eval": VIOLET, "save": ROWS["save"],
}  # fmt: skip
OTHER_PHASES = (YELLOW, VIOLET, SKY, BROWN, PALE, SLATE, GREEN, BLUE, GREY)
TURNS = {"forward": PHASES["forward"], "backward": PHASES["backward"], "weights": GREY}


def color_phases(names: Iterable[str]) -> dict[str, str]:
    """A color for each phase: by its meaning, else by its name, so that it does not depend on which other phases there are.

    Of names that nobody knows two have the same color only where there are more names than colors.
    """
    found: dict[str, str] = {}
    for name in sorted(set(names)):
        known = BESIDE_PHASES.get(name) or PHASES.get(find_meaning(name) or name)
        if known:
            found[name] = known
    taken = set(found.values())
    for name in sorted(set(names) - set(found)):
        start = crc32(name.encode(errors="replace")) % len(OTHER_PHASES)
        hues = OTHER_PHASES[start:] + OTHER_PHASES[:start]
        found[name] = next((hue for hue in hues if hue not in taken), hues[0])
        taken.add(found[name])
    return found
