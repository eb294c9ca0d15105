"""Runs a script in processes of its own, each of which walks it once. Imports no torch."""

import contextlib
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.formats.fit_record import ENDED_EARLY, ChangeName, FitRecord, FitRequest
from megatron_lite.formats.hardware import Processor, cublas_workspace_bytes
from megatron_lite.local_ranks import describe_local_rank, find_free_port
from megatron_lite.planner.fit_results import LargestBatch, WalkedChange
from megatron_lite.planner.what_if import MARGIN
from megatron_lite.variables import BOOTSTRAP, FIT_REQUEST, prepend_python_path

MIN_SAVED = 0.01  # of the peak, for a change to be told
MAX_TRIES = 6  # of batches, until the largest that fits is found
BATCH_STEP = 4  # by which a batch grows or shrinks where nothing tells how far to go
MAX_AT_ONCE = 2  # processes
PORT = 29500  # torchrun's; a rank that is walked reaches nobody


@dataclass(frozen=True)
class Walker:
    """Walks one command.

    Attributes:
        command: Its words.
        processor: The GPU that it finds; None: it runs as on the CPU.
        ranks: Of the job, all on one machine.
        rank: The one that the command is.
    """

    command: tuple[str, ...]
    processor: Processor | None
    ranks: int = 1
    rank: int = 0

    def walk(
        self,
        *,
        quiet: bool = True,
        snapshot: str = "",
        batch: int = 0,
        wanted_batch: int = 0,
        change: ChangeName | None = None,
        with_data: bool = False,
    ) -> FitRecord:
        """Walk the command once.

        Args:
            quiet: Do not show what the script prints.
            snapshot: As in FitRequest, like the rest.
            batch: The script's own.
            wanted_batch: The one that takes its place.
            change: The change to make.
            with_data: Run it with data instead.

        Returns:
            What was found; its `failure` says why nothing was.

        Raises:
            UserError: The command cannot be run, or no process of it imported torch.
        """
        with tempfile.TemporaryDirectory() as name:
            answer = Path(name) / "answer.json"
            request = msgspec.structs.replace(
                make_request(self.processor, str(answer)),
                snapshot=snapshot,
                batch=batch,
                wanted_batch=wanted_batch,
                change=change,
                with_data=with_data,
            )
            environment = prepend_python_path(os.environ, BOOTSTRAP)
            environment[FIT_REQUEST] = msgspec.json.encode(request).decode()
            environment |= self._describe_rank(self.rank)
            try:
                with self._run_others(environment, Path(name)) if with_data else contextlib.nullcontext():
                    ended = subprocess.run(
                        self.command, env=environment, capture_output=quiet, text=True, errors="replace", check=False
                    )
            except OSError as error:
                raise UserError(
                    f"megatron-lite fit: {self.command[0]} cannot be run ({error.strerror}); check its name."
                ) from None
            last = (ended.stderr or "").strip().splitlines()[-1:] if quiet else []
            if answer.exists():
                return _add_last_line(msgspec.json.decode(answer.read_bytes(), type=FitRecord), last)
        unseen = "no process of the command imported torch and trained"
        raise UserError(f"megatron-lite fit: {': '.join([unseen, *last])} (exit code {ended.returncode}).")

    def _describe_rank(self, rank: int) -> dict[str, str]:
        """Make the variables that torchrun sets for a rank; none for a command that is the only one."""
        if self.ranks == 1:
            return {}
        return describe_local_rank(rank, self.ranks, PORT) | {"TORCHELASTIC_RUN_ID": "none"}

    @contextlib.contextmanager
    def _run_others(self, environment: dict[str, str], folder: Path) -> Iterator[None]:
        """Run the other ranks beside this one, which computes with data.

        Args:
            environment: That of this rank. Its port becomes a free one.
            folder: Where the others write their answers.
        """
        if self.ranks == 1:
            yield
            return
        environment["MASTER_PORT"] = str(find_free_port())
        others = []
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            request = FitRequest(answer=str(folder / f"{rank}.json"), with_data=True)
            asked = {FIT_REQUEST: msgspec.json.encode(request).decode()}
            variables = self._describe_rank(rank) | asked | {"MASTER_PORT": environment["MASTER_PORT"]}
            others.append(
                subprocess.Popen(
                    self.command,
                    env=environment | variables,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()

    def walk_kinds_of_ranks(self, show: Callable[[str], object], quiet: bool = True) -> dict[int, FitRecord]:
        """Walk the first and the last rank, and two between them where these hold different memory.

        Args:
            show: Shows progress.
            quiet: Do not show what the script prints.

        Returns:
            What was found by rank.
        """

        def walk(rank: int) -> FitRecord:
            show(f"rank {rank} of {self.ranks} ...")
            return dataclasses.replace(self, rank=rank).walk(quiet=quiet)

        walked = {rank: walk(rank) for rank in sorted({0, self.ranks - 1})}
        if len({record.reserved_peak_bytes for record in walked.values()}) > 1:
            between = {1, self.ranks // 2} - set(walked)
            walked |= {rank: walk(rank) for rank in sorted(between)}
        return walked

    def walk_changes(self, record: FitRecord, show: Callable[[str], object]) -> tuple[WalkedChange, ...]:
        """Walk the command with each change.

        Args:
            record: The walk without one.
            show: Shows progress.

        Returns:
            Those that hold less, the least first.
        """

        def walk(name: ChangeName) -> WalkedChange:
            show(f"with {name.value} ...")
            changed = self.walk(change=name)
            return WalkedChange(name, 0 if changed.failure else changed.reserved_peak_bytes)

        with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
            names = [name for name in ChangeName if self.ranks > 1 or name is not ChangeName.SHARED_STATE]
            walked = list(pool.map(walk, names))
        limit = record.reserved_peak_bytes * (1 - MIN_SAVED)
        useful = [change for change in walked if 0 < change.peak_bytes < limit]
        return tuple(sorted(useful, key=lambda change: change.peak_bytes))

    def find_largest_batch(self, record: FitRecord, show: Callable[[str], object]) -> tuple[LargestBatch | None, str]:
        """Find the largest batch that fits into the GPU with MARGIN of its memory left.

        Memory grows almost in proportion to the batch: a second walk gives the slope, others check where it leads.

        Args:
            record: The walk with the script's own batch.
            show: Shows progress.

        Returns:
            The batch, and why there is none.
        """
        assert self.processor is not None
        if not record.batch:
            return None, "no tensor of a batch was moved to the GPU in a step"
        room_bytes = int(self.processor.memory_bytes * (1 - MARGIN))
        walked = {record.batch: record.reserved_peak_bytes}
        for _ in range(MAX_TRIES):
            wanted = choose_next_batch(walked, room_bytes)
            if wanted in walked:
                break
            show(f"with batches of {wanted} ...")
            found = self.walk(batch=record.batch, wanted_batch=wanted)
            if found.failure:
                return None, f"batches of {wanted} instead of {record.batch} failed: {found.failure}"
            walked[wanted] = found.reserved_peak_bytes
        fitting = [size for size, peak_bytes in walked.items() if peak_bytes <= room_bytes]
        if not fitting:
            return None, f"batches of {min(walked)} do not fit either"
        return LargestBatch(max(fitting), walked[max(fitting)]), ""


def _add_last_line(record: FitRecord, last: list[str]) -> FitRecord:
    """Let a script that ended early say why, in the last line that it wrote to stderr."""
    if record.failure != ENDED_EARLY:
        return record
    return msgspec.structs.replace(record, failure=": ".join([ENDED_EARLY, *last]))


def make_request(processor: Processor | None, answer: str) -> FitRequest:
    """Make the request of a plain walk.

    Args:
        processor: The GPU that the script finds; None: it runs as on the CPU.
        answer: The file in which the answer is written.

    Raises:
        UserError: The GPU is not NVIDIA's.
    """
    if processor is None:
        return FitRequest(answer=answer)
    refuse_other_makers(processor)
    major, minor = f"{processor.capability:.1f}".split(".")
    return FitRequest(
        answer=answer,
        gpu=f"NVIDIA {processor.name}",
        capability=(int(major), int(minor)),
        total_bytes=processor.memory_bytes,
        workspace_bytes=cublas_workspace_bytes(processor, deterministic=False),
    )


def refuse_other_makers(processor: Processor) -> None:
    """Raise UserError for a GPU that is not NVIDIA's: its kernels are others."""
    if processor.capability is None:
        raise UserError(f"--gpu {processor.name}: only NVIDIA's GPUs can be walked; name one of them.")


def choose_next_batch(walked: dict[int, int], room_bytes: int) -> int:
    """Choose the batch to walk next, in search of the largest that fits.

    Memory grows in proportion to the batch where activations make the peak, and not at all where the optimizer does.

    Args:
        walked: Bytes at the peak, by batch.
        room_bytes: What fits.

    Returns:
        A batch that was walked already, where the search has ended.
    """
    fitting = sorted(size for size, peak_bytes in walked.items() if peak_bytes <= room_bytes)
    others = sorted(size for size in walked if size not in fitting)
    if not fitting:
        return max(others[0] // BATCH_STEP, 1)
    largest = fitting[-1]
    if others:
        wanted = _interpolate(walked, largest, others[0], room_bytes)
        # at least one further, and closer than was walked already
        return min(max(wanted, largest + 1), others[0] - 1) if others[0] - largest > 1 else largest
    if len(fitting) > 1:
        wanted = _interpolate(walked, fitting[-2], largest, room_bytes)
        if wanted > largest:
            return wanted
    return largest * BATCH_STEP


def _interpolate(walked: dict[int, int], first: int, second: int, room_bytes: int) -> int:
    """Find where the line through two batches that were walked meets what fits; 0 where it does not rise."""
    slope = (walked[second] - walked[first]) / (second - first)
    if slope <= 0:
        return 0
    return int(first + (room_bytes - walked[first]) / slope)
