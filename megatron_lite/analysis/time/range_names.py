"""Tell by their names what ranges and operators of a trace mean: phases, steps, autograd's work, bookkeeping."""

import re

from megatron_lite.analysis.intervals import Flags
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phase_names import DECORATION_BUT_BRACKETS, NO_PHASE_OF_ITS_OWN, find_meaning
from megatron_lite.phases import PYTHON_GC, Phase

LIGHTNING = "[pl][profile]"  # before each of its names
COMES_INSIDE_ANY = re.compile(rf"nccl|gloo:|c10d::|ucc:|mpi:|{PYTHON_GC}$", re.IGNORECASE)
AUTOGRAD = re.compile(r"autograd::engine::evaluate_function|\w+Backward\d*$|torch::autograd::AccumulateGrad")
WARM_UP = re.compile(r"(?<![a-z])warm(ing)?[ _-]?up", re.IGNORECASE)
# parts of a model or of a job, whose numbers tell them apart; other numbers count calls, requests or tokens
_NUMBERED_PART = re.compile(
    r"(layer|block|module|stage|head|expert|rank|gpu|device|bucket|level|depth"
    r"|conv|encoder|decoder|group|chunk)s?[ ._:#-]*\d",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


def is_phase(name: str) -> bool:
    """Whether the table knows the name as that of a phase."""
    return find_meaning(name) not in ("", NO_PHASE_OF_ITS_OWN)


def known_phase(name: str) -> Phase | None:
    """The trainer's phase that a range with this name is; None if the name means none."""
    meaning = find_meaning(name)
    return Phase(meaning) if meaning in set(Phase) else None


def label_phase(name: str) -> str:
    """Label a range for a report: the table's name for it where there is one, else its own without decoration."""
    if is_phase(name):
        return find_meaning(name)
    bare = name.removeprefix(LIGHTNING).strip(DECORATION_BUT_BRACKETS)
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    return bare.partition("#")[0].strip() or name


def drop_numbers(name: str) -> str:
    """The name with N for each number, which is the same in each call: "execute_context_0(0)" ->
    "execute_context_N(N)".

    The number of a layer, a block or a rank stays: it tells parts apart that are there in each step.
    """
    return name if _NUMBERED_PART.search(name) else _NUMBER.sub("N", name)


def is_backward(trace: Trace) -> Flags:
    """Tell for each event (bool [n]) whether it is an operator of autograd's engine.

    These are known by their names, or by the forward thread that they name.
    """
    is_named = trace.matching(AUTOGRAD.match)
    names_forward_thread = trace.events.forward_thread > 0
    is_operator = trace.events.kind == Kind.OP
    found: Flags = is_operator & (is_named | names_forward_thread)
    return found
