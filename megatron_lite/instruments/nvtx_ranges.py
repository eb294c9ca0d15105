"""NVTX ranges and marks, which Nsight Systems shows: by torch's CUDA build, else by NVIDIA's package `nvtx`."""

import torch


class TorchNvtx:
    """What torch's CUDA build has of NVTX, in the default domain."""

    push, pop, mark = (
        staticmethod(f)
        for f in (
            torch.cuda.nvtx.range_push,
            torch.cuda.nvtx.range_pop,
            torch.cuda.nvtx.mark,
        )
    )


class PackageNvtx:
    """The same by the package `nvtx`, for processes without CUDA. Its texts are registered strings."""

    def __init__(self):
        import nvtx

        domain = nvtx.get_domain(None)
        if type(domain).__name__ == "DummyDomain":
            domain = _awake(nvtx.Domain)
            self.push = lambda text: domain.push_range(domain.get_event_attributes(message=text))
            self.mark = lambda text: domain.mark(domain.get_event_attributes(message=text))
            self.pop = domain.pop_range
        else:
            self.push, self.mark, self.pop = nvtx.push_range, nvtx.mark, nvtx.pop_range


def _awake(kind):
    """The default domain of nvtx >= 0.2.12 where the package takes it for switched off.

    It asks the tool by a function that nsys of 2022 to 2024 does not serve, and then drops every range without a word,
    although the ranges themselves would be recorded.
    """
    from nvtx._lib.lib import DomainHandle

    domain = object.__new__(kind)
    domain.handle = DomainHandle(None)
    domain.__init__(None)
    return domain


def nvtx_for(device: str) -> TorchNvtx | PackageNvtx:
    """What can push ranges in this process; RuntimeError, with the way out, if nothing can."""
    if device == "cuda":
        return TorchNvtx()
    try:
        return PackageNvtx()
    except ImportError:
        if hasattr(torch._C, "_nvtx"):  # a CUDA build that trains on the CPU
            return TorchNvtx()
        raise RuntimeError(
            "the package nvtx is missing, without which a CPU run has no ranges; pip install nvtx"
        ) from None


class Span:
    """A range around a block of code."""

    def __init__(self, nvtx, text: str):
        self._nvtx, self._text = nvtx, text

    def __enter__(self):
        self._nvtx.push(self._text)

    def __exit__(self, *error):
        self._nvtx.pop()
