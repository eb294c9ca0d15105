"""Tell which accelerator a trace shows, by accelerators.tsv, which a user can extend."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class Accelerator:
    """A row of accelerators.tsv."""

    name: str
    number: int | None  # torch's DeviceType
    categories: frozenset[str]
    tracks: re.Pattern[str]
    operators: re.Pattern[str]


@lru_cache(maxsize=1)
def read_accelerators() -> tuple[Accelerator, ...]:
    """The table, in its order."""
    rows = []
    for line in Path(__file__).with_name("accelerators.tsv").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name, number, categories, tracks, operators = (line + "\t" * 4).split("\t")[:5]
        rows.append(
            Accelerator(
                name=name,
                number=int(number) if number else None,
                categories=frozenset(categories.split(",")) - {""},
                tracks=re.compile(tracks, re.IGNORECASE) if tracks else _NEVER,
                operators=re.compile(operators) if operators else _NEVER,
            )
        )
    return tuple(rows)


def is_accelerator(name: str) -> bool:
    """Whether it is a name of the table, and not a product's that a file gives."""
    return any(row.name == name for row in read_accelerators())


def find_track_owner(text: str) -> str:
    """The accelerator that a track's name means; '' for none."""
    return next((row.name for row in read_accelerators() if row.tracks.search(text)), "")


# Operators that only a GPU has, by cuDNN, MIOpen and the kernels of scaled_dot_product_attention. A CPU asks whether
# cuDNN may be used, and has a flash attention of its own.
GPU_OPERATORS = re.compile(
    r"aten::(_?cudnn_(?!is_acceptable)|_?miopen_|_(flash|efficient)_attention_"
    r"|_scaled_dot_product_(flash_attention(?!_for_cpu)|efficient_attention|cudnn_attention)"
    r"|_thnn_fused_|_fused_rms_norm_cuda|_cuda_)"
)


def find_accelerator(
    categories: Iterable[str], tracks: Iterable[str], operators: Iterable[str], numbers: Iterable[int]
) -> str:
    """The first accelerator of the table that any of these show; '' for none.

    Args:
        categories: Categories of the trace's events.
        tracks: Names of its processes.
        operators: Names of its operators.
        numbers: Types of the devices that memory was allocated on.
    """
    given_categories = set(categories)
    given_numbers = set(numbers)
    texts = list(tracks)
    names = list(operators)
    for row in read_accelerators():
        shown = bool(row.categories & given_categories) or row.number in given_numbers
        if shown or any(map(row.tracks.search, texts)) or any(map(row.operators.match, names)):
            return row.name
    return ""
