"""Dumps of torch's flight recorder in this process, in the form that torch itself writes when NCCL times out."""

from pathlib import Path

from megatron_lite.last_words import flight_path, replace_file
from megatron_lite.parallel.rank_status import FlightRecorder

# first the one whose collectives are the training's
BACKENDS = ("nccl", "gloo")


class FlightDump:
    """Reads what was recorded of all backends. Nothing here runs a collective."""

    def __init__(self) -> None:
        self._recorders = {backend: FlightRecorder(backend) for backend in BACKENDS}

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
        has_written = False
        for backend, recorder in self._recorders.items():
            dump = recorder.dump() if recorder.counts() else b""
            if not dump:
                continue
            if has_written:
                # beside that of the other backend
                place = place.with_name(f"{backend}-{place.name}")
            replace_file(place, dump)
            has_written = True


def remove_flight(folder: Path, name: str) -> None:
    """Remove this rank's recordings. folder, name: as of `FlightDump.write`."""
    place = flight_path(folder, name)
    place.unlink(missing_ok=True)
    for backend in BACKENDS:
        place.with_name(f"{backend}-{place.name}").unlink(missing_ok=True)
