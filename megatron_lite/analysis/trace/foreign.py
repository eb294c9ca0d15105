"""Tell which Chrome traces PyTorch did not write, and who did: foreign_writers.tsv, which a user can extend.

A file is PyTorch's by what stands in it: keys and categories of its profiler. Files of any year, bare lists and parts
of files have some of them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_lite.analysis.trace.accelerators import find_accelerator
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.analysis.trace.kineto_json import Id
from megatron_lite.analysis.trace.kineto_kinds import KIND_OF_PROCESS, Tracks, kind_of_category
from megatron_lite.formats.perfetto_trace import MAX_BEFORE_WRITER, MERGED_BY

# What only torch.profiler (and torch_npu's) writes. "schemaVersion" and "baseTimeNanoseconds" have other writers, too.
OF_TORCH = re.compile(
    rb'"(deviceProperties|distributedInfo)"|"cat"\s*:\s*"(cpu_op|user_annotation|python_function|gpu_memcpy|gpu_memset'
    rb"|gpu_user_annotation|cuda_runtime|cuda_driver|hip_runtime"
    rb'|xpu_runtime|mtia_runtime|privateuse1_runtime|ac2g|fwdbwd)"'
    rb'|ProfilerStep#|"Ascend Hardware"|"aten::|"(CPU|CUDA) functions"'
)
# The same in a Perfetto trace, where names and categories stand in a table of their own.
PACKETS_OF_TORCH = re.compile(rb"cpu_op|cuda_runtime|user_annotation|python_function|ProfilerStep#|aten::")
CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{0,80})"')
MAX_NAMED_CATEGORIES = 4  # in a message
WHAT_IS_READ = "what is read are traces of torch.profiler and exports of Nsight Systems (nsys export --type sqlite)"
NOT_PYTORCH = "a Chrome trace that PyTorch did not write"
NOT_PYTORCH_PACKETS = "a Perfetto trace that PyTorch did not write"


@dataclass(frozen=True)
class Writer:
    """A row of foreign_writers.tsv."""

    name: str
    pattern: re.Pattern[bytes]
    always: bool  # even where categories stand in the file that PyTorch has, too


@lru_cache(maxsize=1)
def read_foreign_writers() -> tuple[Writer, ...]:
    """The table, in its order."""
    rows = []
    text = Path(__file__).with_name("foreign_writers.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, pattern, always, *_ = f"{line}\t\t".split("\t")
            writer = Writer(
                name=name,
                pattern=re.compile(pattern.encode()),
                always=always == "always",
            )
            rows.append(writer)
    return tuple(rows)


@dataclass(frozen=True)
class ForeignFile:
    """A row of foreign_files.tsv."""

    what: str
    pattern: re.Pattern[bytes]
    remedy: str


@lru_cache(maxsize=1)
def read_foreign_files() -> tuple[ForeignFile, ...]:
    """The table of files that are no traces, in its order."""
    rows = []
    text = Path(__file__).with_name("foreign_files.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            what, pattern, remedy, *_ = f"{line}\t\t".split("\t")
            rows.append(ForeignFile(what, re.compile(pattern.encode(), re.DOTALL), remedy or WHAT_IS_READ))
    return tuple(rows)


def name_foreign_file(head: bytes) -> str:
    """Name what a file that begins with `head` is, and what to do; '' for nothing that is known."""
    for row in read_foreign_files():
        if row.pattern.match(head):
            return f"{row.what}; {row.remedy}"
    return ""


def is_of_torch(text: bytes) -> bool:
    """Whether this part of a file holds what only PyTorch writes."""
    return bool(OF_TORCH.search(text))


def are_packets_of_torch(text: bytes) -> bool:
    """Whether this part of a Perfetto trace holds what PyTorch writes."""
    return bool(PACKETS_OF_TORCH.search(text))


def is_own_timeline(head: bytes) -> bool:
    """Whether the Perfetto trace that begins with `head` is one that `report --perfetto` wrote."""
    return MERGED_BY.encode() in head[:MAX_BEFORE_WRITER]


def describe_foreign_packets(head: bytes) -> str:
    """Why the Perfetto trace that begins with `head`, which holds nothing of PyTorch's, is none of PyTorch's."""
    for writer in read_foreign_writers():
        if writer.always and writer.pattern.search(head):
            return f"a Perfetto trace that {writer.name} wrote, not PyTorch; {WHAT_IS_READ}"
    return f"{NOT_PYTORCH_PACKETS}; {WHAT_IS_READ}"


def describe_foreign(text: bytes, is_whole: bool) -> str:
    """Why the trace that begins with `text` is none of PyTorch's; '' where it is, or where its beginning does not tell.

    Args:
        text: The beginning of the file; `is_of_torch` says no of it.
        is_whole: Is that the whole file?
    """
    categories = {found.decode("utf-8", "replace") for found in CATEGORY.findall(text)}
    is_known = any_known(categories, ())
    for writer in read_foreign_writers():
        if (writer.always or not is_known) and writer.pattern.search(text):
            return f"a trace that {writer.name} wrote, not PyTorch; {WHAT_IS_READ}"
    return describe_unknown(categories) if is_whole and categories and not is_known else ""


def find_foreign(
    header: Mapping[str, object],
    categories: Iterable[str | None],
    threads: Iterable[tuple[Id, Id]],
    tracks: Tracks,
    form: str = NOT_PYTORCH,
) -> str:
    """Why a trace that was read is none of PyTorch's: neither a key beside its events nor a category of these; '' where
    it is.

    Args:
        header: What stands beside the events.
        categories: Categories of the events.
        threads: (process, thread) of the events.
        tracks: Names of these.
        form: What such a file is.
    """
    of_torch = any(key in header for key in ("schemaVersion", "deviceProperties", "distributedInfo"))
    used = [category or "" for category in categories]
    processes = {process for process, _ in threads}
    shown = find_accelerator(used, map(tracks.process, processes), (), ())
    return "" if of_torch or shown or any_known(used, processes) else describe_unknown(used, form)


def describe_unknown(categories: Iterable[str], form: str = NOT_PYTORCH) -> str:
    """Describe a trace that PyTorch did not write, by categories that torch.profiler has not."""
    names = sorted(filter(None, categories))
    if not names:
        return f"{form}: its events have no category of torch.profiler"
    shown = ", ".join(names[:MAX_NAMED_CATEGORIES])
    if len(names) > MAX_NAMED_CATEGORIES:
        shown += f" and {len(names) - MAX_NAMED_CATEGORIES} more"
    return f"{form}: torch.profiler has none of its categories ({shown})"


def any_known(categories: Iterable[str], processes: Iterable[object]) -> bool:
    """Whether an event of one of these categories or processes is read."""
    read = any(kind_of_category(category) is not Kind.OTHER for category in categories)
    return read or any(process in KIND_OF_PROCESS for process in processes)
