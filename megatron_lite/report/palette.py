"""Which color a part of time or memory has, in every chart and table of the page; page.css gives each name its value."""

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.estimate.prediction import CATEGORIES

HUES = ("blue", "orange", "green", "vermilion", "sky", "purple", "yellow", "slate", "grey", "pale", "violet", "brown")
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, SLATE, GREY, PALE, VIOLET, BROWN = (
    f"var(--{hue})" for hue in HUES
)
SERIES = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, SLATE, GREY, PALE)
INK, LINE, CARD = "var(--ink)", "var(--line)", "var(--card)"
HELD = {
    **dict(zip(CATEGORIES, SERIES)),
    "gathered parameters": VIOLET, "awaiting free": BROWN, "KV cache": ORANGE, "other": GREY, "before the record": PALE,
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
