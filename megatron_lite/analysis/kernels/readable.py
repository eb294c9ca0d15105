"""Kernel names short enough to read."""

import re

from megatron_lite.analysis.kernels.roles import LONGEST
from megatron_lite.analysis.kernels.torch_names import functor_of

_RETURN_TYPES = re.compile(r"^(?:static |inline |void |__global__ )+")
_SAYING = re.compile(
    r"FlashAttn\w+|FlashAttention\w+|ImplicitGemm\w+|GemmUniversal\w*|ReduceSplitK|ReduceOp\w*|Gemm\w*"
)
_SHORTEST = 80


def demangled(name: str) -> str:
    """The identifiers of a mangled C++ name: _ZN7cutlass6KernelINS_4GemmE -> cutlass::Kernel<Gemm>. Else as it is."""
    start = re.match(r"_Z[NLK]*(?=\d)", name)
    if not start:
        return name
    outer, at = [], start.end()
    while found := _identifier(name, at):
        word, at = found
        outer.append(word)
    inner = []
    while digits := re.compile(r"\d+").search(name, at):
        # Numbers of template arguments (Li128E) stand where the length of an identifier might.
        number = name[digits.start() - 2 : digits.start()] in ("Li", "Lj", "Lb", "Lm")
        word, at = (not number and _identifier(name, digits.start())) or ("", digits.end())
        inner += [word] if word else []
    arguments = f"<{', '.join(inner)}>" if inner else ""
    return "::".join(outer) + arguments if outer else name


def _identifier(name: str, at: int) -> tuple[str, int] | None:
    """(word, its end) if a length and a word of that length stand at `at`."""
    digits = re.compile(r"\d{1,4}").match(name, at)
    if not digits:
        return None
    end = digits.end() + int(digits[0])
    word = name[digits.end() : end]
    return (word, end) if end <= len(name) and re.fullmatch(r"[A-Za-z_]\w*", word) else None


def short_name(name: str) -> str:
    """No return type, no arguments; of the template arguments only what says what the kernel does."""
    text = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", demangled(name[:LONGEST]))
    text = _RETURN_TYPES.sub("", text.strip())
    scheme = re.match(r"cutlass\w*::Kernel2?<\s*(\w+)\s*>", text)
    if scheme:
        return scheme[1]
    if re.match(r"\[?(CUDA )?mem(cpy|set)", text, re.IGNORECASE):
        return text
    head = re.split(r"[<(]", text)[0].strip()
    if head.startswith(("at::", "c10::", "at_cuda_detail::")):
        head = head.rpartition("::")[2]
    function = functor_of(text) if "<" in text else ""
    if not function and "cutlass" in head:
        saying = _SAYING.search(text)
        function = saying[0] if saying else ""
    return f"{head}<{function}>" if function else head or text[:_SHORTEST]
