"""How much memory this process uses, cheap enough for every step."""

import os

import torch

STATM = "/proc/self/statm"  # Linux only; pages: total, resident, of which backed by files, ...
PEAKS = ("allocated_bytes", "reserved_bytes")


class MemoryNow:
    """Host memory, and on a GPU the allocator's peak of each step.

    Peaks are set back at every step. What the allocator would say without that, `stats` says.
    """

    def __init__(self, cuda: bool):
        self._cuda = cuda
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open(STATM, os.O_RDONLY) if os.path.exists(STATM) else None
        self._peaks = dict.fromkeys(PEAKS, 0)  # of the whole run

    def host_bytes(self) -> int | None:
        """What this process holds itself: pages of mapped files, such as the data's, are the page cache's. None where the
        system does not say."""
        if self._statm is None:
            return None
        resident, backed_by_files = os.pread(self._statm, 128, 0).split()[1:3]
        return (int(resident) - int(backed_by_files)) * self._page_bytes

    def peak_bytes(self) -> int | None:
        """Most that tensors took at once since the last call; None without a GPU."""
        if not self._cuda:
            return None
        found = torch.cuda.memory_stats_as_nested_dict()  # the flat form costs ten times as much
        peaks = {name: found[name]["all"]["peak"] for name in PEAKS}
        torch.cuda.reset_peak_memory_stats()
        self._peaks = {name: max(peak, peaks[name]) for name, peak in self._peaks.items()}
        return peaks["allocated_bytes"]

    def stats(self) -> dict[str, int]:
        """torch.cuda.memory_stats(), with the peaks of the whole run."""
        found = torch.cuda.memory_stats()
        for name, peak in self._peaks.items():
            found[f"{name}.all.peak"] = max(peak, found[f"{name}.all.peak"])
        return found

    def close(self):
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
