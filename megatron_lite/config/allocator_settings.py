"""The words of PYTORCH_ALLOC_CONF: options of torch's allocator for GPU memory.

Names, values and which variable wins: pytorch c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.cpp, 2026.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from megatron_lite.units import is_number

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one that is set counts
SWITCHES = frozenset(
    {
        "expandable_segments",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
LEAST = {"max_split_size_mb": 20, "max_non_split_rounding_mb": 20}  # smaller ones are refused
BACKENDS = ("native", "cudaMallocAsync")
OPTIONS = frozenset(
    {
        *SWITCHES,
        *LEAST,
        "backend",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "large_segment_size_mb",
        "per_process_memory_fraction",
    }
)


def allocator_hints(environ: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the settings, a line each: what torch refuses, and options that do nothing together."""
    name = next((name for name in VARIABLES if name in environ), None)
    if name is None:
        return
    if name == VARIABLES[0] and environ.get(VARIABLES[1]) not in (None, "", environ[name]):
        yield f"{VARIABLES[1]}={environ[VARIABLES[1]]} does not count beside {name}={environ[name]}; unset one of them."
    settings, broken = _settings(environ[name])
    for words in broken:
        yield f"{name}: '{words}' is no option:value, which torch refuses; write such as expandable_segments:True."
    for option, value in settings.items():
        yield from (f"{name}={option}:{value}: {wrong}" for wrong in _wrong(option, value))
    if settings.get("expandable_segments") == "True" and "max_split_size_mb" in settings:
        yield (
            f"{name}: max_split_size_mb:{settings['max_split_size_mb']} does nothing with expandable_segments:True, whose "
            "blocks are always split; drop it."
        )
    native = sorted({"expandable_segments", "garbage_collection_threshold", *LEAST} & set(settings))
    if settings.get("backend") == BACKENDS[1] and native:
        yield f"{name}: backend:{BACKENDS[1]} ignores {', '.join(native)}; drop one or the other."


def _settings(text: str) -> tuple[dict[str, str], list[str]]:
    """({option: value}, the parts that are none). A value in brackets may hold commas; blanks do not count."""
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", re.sub(r"\s", "", text))
    pairs = [part.partition(":") for part in parts]
    return (
        {option: value for option, colon, value in pairs if option and value},
        [option + colon + value for option, colon, value in pairs if not (option and value)],
    )


def _wrong(option: str, value: str) -> Iterator[str]:
    """Why torch does not take it, with the remedy."""
    if option not in OPTIONS:
        near = get_close_matches(option, OPTIONS, 1)
        yield (
            f"torch may refuse this option; did you mean {near[0]}?"
            if near
            else "torch may refuse this option; check its name."
        )
    elif option in SWITCHES and value not in ("True", "False"):
        yield "is refused by torch; write True or False, with a capital."
    elif option in LEAST and not (value.isdigit() and int(value) >= LEAST[option]):
        yield f"is refused by torch; give a whole number of at least {LEAST[option]}."
    elif option == "garbage_collection_threshold" and not (is_number(value) and 0 < float(value) < 1):
        yield "is refused by torch; give a part of the memory between 0 and 1, such as 0.8."
    elif option == "backend" and value not in BACKENDS:
        yield f"is refused by torch; there are {' and '.join(BACKENDS)}."
