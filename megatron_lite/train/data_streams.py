"""The data sets of a run and the streams of micro-batches drawn from them."""

import itertools
import logging
from collections.abc import Iterator

from torch import Tensor

from megatron_lite.config.data_paths import SPLIT, read_argument_files
from megatron_lite.config.plan import Plan
from megatron_lite.data.build import Dataset, DataSpec, build_datasets
from megatron_lite.data.external import ExternalStreams
from megatron_lite.data.loader import batches, cyclic_batches, epoch_batches, require_block, single_batches
from megatron_lite.data.sample_pieces import SamplePiece, find_pieces
from megatron_lite.errors import DataError
from megatron_lite.train.loop import Progress
from megatron_lite.units import count

logger = logging.getLogger(__name__)


class DataStreams:
    """Opens the data once. Its streams yield raw_BT1, one micro-batch of this rank after the other."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._streams: ExternalStreams | _DatasetStreams
        if plan.args.data.dataloader_type == "external":
            self._streams = ExternalStreams(plan)
        else:
            self._streams = _DatasetStreams(plan)

    def has(self, split: str) -> bool:
        """Tell whether this split, "valid" or "test", has samples."""
        return self._streams.has(split)

    @property
    def validation_samples(self) -> int:
        """The number of samples of one validation."""
        if self.plan.args.watch.full_validation:
            return self._data_sets.count("valid")
        return self.plan.evaluation_samples

    @property
    def _data_sets(self) -> "_DatasetStreams":
        """The streams of data sets, whose length is known."""
        assert isinstance(self._streams, _DatasetStreams), "a loader of the user's own has no end"
        return self._streams

    def _stream(self, split: str, consumed: int, wanted: int) -> Iterator[Tensor]:
        """Open the stream of a split that has samples, from sample `consumed` on, of which `wanted` are to come."""
        stream = self._streams.stream(split, consumed, wanted)
        assert stream is not None, "a split without samples is not asked for"
        return stream

    def training(self, progress: Progress) -> Iterator[Tensor]:
        """Open the stream of training, from the first sample on that has not been trained on."""
        batch = self.plan.batch
        wanted = batch.samples(self.plan.train_iters) - batch.samples(progress.iteration)
        return self._stream("train", progress.consumed, wanted)

    def draw_samples(self, consumed: int) -> Iterator[list[int]] | None:
        """Draw the numbers of the samples of training that this rank takes from sample `consumed` on, a micro-batch at
        a time; None where a loader of the user's own draws them."""
        if not isinstance(self._streams, _DatasetStreams):
            return None
        return self._streams.draw("train", consumed)

    def find_pieces(self, sample: int) -> list[SamplePiece]:
        """Find the pieces of documents in a sample of training; [] where they are unknown."""
        return self._data_sets.find_pieces(sample)

    def validation(self, progress: Progress) -> Iterator[Tensor]:
        """Open the stream of validation, from the first sample on that earlier evaluations have not used.

        As in Megatron-LM, --skip-train starts over, and for a checkpoint that does not count them the flags tell how
        many there were.
        """
        t = self.plan.args.training
        w = self.plan.args.watch
        if w.full_validation:
            return self._data_sets.stream_epochs("valid")
        one = self.plan.evaluation_samples
        past = w.count_validations(progress.iteration)
        if t.skip_train:
            return self._stream("valid", 0, one)
        if not progress.consumed_valid and t.train_samples is None:
            progress.consumed_valid = past * one
        to_come = w.count_validations(self.plan.train_iters) - past + 1
        return self._stream("valid", progress.consumed_valid, to_come * one)

    def test(self) -> Iterator[Tensor]:
        """Open the stream of the test split, from the first sample on."""
        return self._stream("test", 0, self.plan.evaluation_samples)


class _DatasetStreams:
    """Streams of indexed data sets, or of mock data."""

    def __init__(self, plan: Plan):
        self.plan = plan
        d = read_argument_files(plan.args.data)
        sizes = _count_samples(plan)
        spec = DataSpec(d, sizes, plan.shape.seq_length, plan.args.training.seed, plan.vocab_size)
        self._sets = build_datasets(spec)
        for name, size in zip(("train", "valid", "test"), sizes):
            samples: Dataset | None = getattr(self._sets, name)
            if samples is None:
                is_empty = size != 0 and d.data_path
                why = f" (--split {d.split or SPLIT} leaves it no document)" if is_empty else ""
                logger.info(f"  {name} data: none{why}")
                continue
            logger.info(f"  {name} data: {count(len(samples))} samples")
            if size is None:
                continue
            if len(samples) < size and d.dataloader_type == "single":
                flag = f"--{name}-data-path" if getattr(d, f"{name}_data_path") else "--data-path"
                raise DataError(
                    f"{flag}: several data sets without weights are read once, and their {name} share of "
                    f"{count(len(samples))} samples is less than the {count(size)} that the run takes; give "
                    "each a weight, which repeats them, or train or evaluate less."
                )
            require_block(len(samples), self._get_micro_batch(name), plan.layout.data)

    def has(self, split: str) -> bool:
        """Tell whether this split has samples."""
        return getattr(self._sets, split) is not None

    def count(self, split: str) -> int:
        """The number of samples of a split that has some."""
        return len(self._find(split))

    def _find(self, split: str) -> Dataset:
        """Find the data set of a split that has samples."""
        dataset: Dataset | None = getattr(self._sets, split)
        assert dataset is not None, "a split without samples is not asked for"
        return dataset

    def _get_micro_batch(self, split: str) -> int:
        """The number of samples of a micro-batch on one rank."""
        return self.plan.args.training.micro_batch_size if split == "train" else self.plan.evaluation_micro_batch

    def stream_epochs(self, split: str) -> Iterator[Tensor]:
        """Open a stream of all samples, again and again, each time in as many batches as Plan.count_evaluation_passes
        says."""
        layout = self.plan.layout
        dataset = self._find(split)
        indices = epoch_batches(len(dataset), self._get_micro_batch(split), layout.data_rank, layout.data)
        return batches(dataset, indices, num_workers=self.plan.loader_workers, pin=self.plan.device == "cuda")

    def draw(self, split: str, consumed: int) -> Iterator[list[int]]:
        """Draw the numbers of this rank's samples of each micro-batch, from sample `consumed` of all ranks on."""
        plan = self.plan
        d = plan.args.data
        samples = len(self._find(split))
        place = (self._get_micro_batch(split), plan.layout.data_rank, plan.layout.data)
        if d.dataloader_type == "cyclic":
            return cyclic_batches(samples, consumed, *place, data_sharding=d.data_sharding)
        return single_batches(samples, consumed, *place)

    def find_pieces(self, sample: int) -> list[SamplePiece]:
        """Find the pieces of documents in a sample of training."""
        return find_pieces(self._find("train"), sample)

    def stream(self, split: str, consumed: int, wanted: int) -> Iterator[Tensor]:
        """Open a stream of batches from sample `consumed` on.

        Raises:
            DataError: There are fewer than `wanted` samples left to train on.
        """
        plan = self.plan
        d = plan.args.data
        dataset = self._find(split)
        indices = self.draw(split, consumed)
        if d.dataloader_type != "cyclic" and consumed + wanted > len(dataset):
            # after a resume with other flags: the data set is as long as today's flags take from its start
            wish = f"the {count(consumed)} consumed so far and {count(wanted)} to come"
            found = f"{split} data: {count(len(dataset))} samples are fewer than {wish}"
            if split == "train":
                raise DataError(
                    f"{found}; resume with the --global-batch-size of the run that was saved, or add --finetune to "
                    "begin with the first sample."
                )
            logger.info(f"  {found}; after the last one evaluations begin with the first again")
            again = (self.draw(split, 0) for _ in itertools.count())
            indices = itertools.chain(indices, itertools.chain.from_iterable(again))
        return batches(dataset, indices, num_workers=plan.loader_workers, pin=plan.device == "cuda")


def _count_samples(plan: Plan) -> tuple[int, int | None, int]:
    """Count the samples that a run takes for training, validation and test; None: all of one epoch."""
    watch = plan.args.watch
    evaluated = plan.evaluation_samples
    trained = 0
    # one evaluation per interval and one at the end, each on samples of its own
    evaluations = 1
    if not plan.args.training.skip_train:
        trained = plan.train_samples
        evaluations += watch.count_validations(plan.train_iters)
    validated = None if watch.full_validation else evaluations * evaluated
    return trained, validated, evaluated
