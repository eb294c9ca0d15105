"""Dumps of torch's flight recorder in this process, in the form that torch itself writes when NCCL times out."""

from collections.abc import Callable
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from megatron_lite.last_words import flight_path, replace_file
from megatron_lite.parallel.rank_status import FlightRecorder

# by backend, first the one whose collectives are the training's; private, but what torch's own debug server calls
DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
Dump = Callable[[bool, bool, bool], bytes]


class FlightDump:
    """Reads what was recorded of all backends. Nothing here runs a collective."""

    def __init__(self) -> None:
        self._recorders = {backend: FlightRecorder(backend) for backend in DUMPS}

    def read_counts(self) -> dict[str, tuple[int, int]]:
        """Read the numbers of the collectives begun and finished last, by group; takes microseconds."""
        counts: dict[str, tuple[int, int]] = {}
        for recorder in self._recorders.values():
            # a group of two backends has one name
            counts = recorder.counts() | counts
        return counts

    def write(self, folder: Path, name: str) -> None:
        """Write all that is recorded, with the lines that called it: a file for each backend that has recorded.

        Args:
            folder: Folder of the recording.
            name: The rank's name in names of files.
        """
        place = flight_path(folder, name)
        for backend, recorder in self._recorders.items():
            dump: Dump | None = getattr(c10d, DUMPS[backend], None)
            if dump is None or not recorder.counts():
                continue
            replace_file(place, dump(True, True, False))
            # a second one, beside it
            place = place.with_name(f"{backend}-{place.name}")


def remove_flight(folder: Path, name: str) -> None:
    """Remove this rank's recordings. folder, name: as of `FlightDump.write`."""
    place = flight_path(folder, name)
    place.unlink(missing_ok=True)
    for backend in DUMPS:
        place.with_name(f"{backend}-{place.name}").unlink(missing_ok=True)
