"""The data sets of a run and the streams of micro-batches drawn from them."""

import itertools
import logging
from collections.abc import Iterator

from torch import Tensor

from megatron_lite.config.data_paths import SPLIT, read_argument_files
from megatron_lite.config.plan import Plan
from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.data.external import ExternalStreams
from megatron_lite.data.loader import batches, cyclic_batches, epoch_batches, require_block, single_batches
from megatron_lite.errors import DataError
from megatron_lite.train.loop import Progress
from megatron_lite.units import count

logger = logging.getLogger(__name__)


class DataStreams:
    """Opens the data once. Its streams yield raw_BT1, one micro-batch of this rank after the other."""

    def __init__(self, plan: Plan):
        self.plan = plan
        external = plan.args.data.dataloader_type == "external"
        self._streams = ExternalStreams(plan) if external else _DatasetStreams(plan)

    def has(self, split: str) -> bool:
        """Whether this split, "valid" or "test", has samples."""
        return self._streams.has(split)

    @property
    def validation_samples(self) -> int:
        """Samples of one validation."""
        if self.plan.args.watch.full_validation:
            return self._streams.count("valid")
        return self.plan.evaluation_samples

    def training(self, progress: Progress) -> Iterator[Tensor]:
        """Batches from the first sample on that has not been trained on."""
        batch, last = self.plan.batch, self.plan.train_iters
        return self._streams.stream("train", progress.consumed, batch.samples(last) - batch.samples(progress.iteration))

    def validation(self, progress: Progress) -> Iterator[Tensor]:
        """Batches from the first sample on that earlier evaluations have not used.

        As in Megatron-LM, --skip-train starts over, and for a checkpoint that does not count them the flags tell how
        many there were.
        """
        t, w = self.plan.args.training, self.plan.args.watch
        if w.full_validation:
            return self._streams.stream_epochs("valid")
        one, past = self.plan.evaluation_samples, w.count_validations(progress.iteration)
        if t.skip_train:
            return self._streams.stream("valid", 0, one)
        if not progress.consumed_valid and t.train_samples is None:
            progress.consumed_valid = past * one
        return self._streams.stream(
            "valid", progress.consumed_valid, (w.count_validations(self.plan.train_iters) - past + 1) * one
        )

    def test(self) -> Iterator[Tensor]:
        """Batches from the first sample on."""
        return self._streams.stream("test", 0, self.plan.evaluation_samples)


class _DatasetStreams:
    """Streams of indexed data sets, or of mock data."""

    def __init__(self, plan: Plan):
        self.plan = plan
        d, w = read_argument_files(plan.args.data), plan.args.watch
        evaluated = plan.evaluation_samples
        # one evaluation per interval and one at the end, each on samples of its own
        training = not plan.args.training.skip_train
        evaluations = training * w.count_validations(plan.train_iters) + 1
        validated = None if w.full_validation else evaluations * evaluated
        sizes = (training * plan.train_samples, validated, evaluated)
        spec = DataSpec(d, sizes, plan.shape.seq_length, plan.args.training.seed, plan.vocab_size)
        self._sets = build_datasets(spec)
        for name, size in zip(("train", "valid", "test"), sizes):
            samples = getattr(self._sets, name)
            why = f" (--split {d.split or SPLIT} leaves it no document)" if size != 0 and d.data_path else ""
            logger.info(
                f"  {name} data: {count(len(samples))} samples" if samples is not None else f"  {name} data: none{why}"
            )
            if samples is not None and len(samples) < (size or 0) and d.dataloader_type == "single":
                flag = f"--{name}-data-path" if getattr(d, f"{name}_data_path") else "--data-path"
                raise DataError(
                    f"{flag}: several data sets without weights are read once, and their {name} share of "
                    f"{count(len(samples))} samples is less than the {count(size)} that the run takes; give "
                    "each a weight, which repeats them, or train or evaluate less."
                )
            if samples is not None and size is not None:
                require_block(len(samples), self._get_micro_batch(name), plan.layout.data)

    def has(self, split: str) -> bool:
        return getattr(self._sets, split) is not None

    def count(self, split: str) -> int:
        """The number of samples."""
        return len(getattr(self._sets, split))

    def _get_micro_batch(self, split: str) -> int:
        """Samples of a micro-batch on one rank."""
        return self.plan.args.training.micro_batch_size if split == "train" else self.plan.evaluation_micro_batch

    def stream_epochs(self, split: str) -> Iterator[Tensor]:
        """All samples, again and again, each time in as many batches as Plan.count_evaluation_passes says."""
        layout, dataset = self.plan.layout, getattr(self._sets, split)
        indices = epoch_batches(len(dataset), self._get_micro_batch(split), layout.data_rank, layout.data)
        return batches(dataset, indices, num_workers=self.plan.loader_workers, pin=self.plan.device == "cuda")

    def stream(self, split: str, consumed: int, wanted: int) -> Iterator[Tensor]:
        """Batches from sample `consumed` on.

        Raises DataError if there are fewer than `wanted` samples left to train on.
        """
        plan, d, dataset = self.plan, self.plan.args.data, getattr(self._sets, split)
        place = (self._get_micro_batch(split), plan.layout.data_rank, plan.layout.data)
        if d.dataloader_type == "cyclic":
            indices = cyclic_batches(len(dataset), consumed, *place, data_sharding=d.data_sharding)
        else:
            indices = single_batches(len(dataset), consumed, *place)
            if consumed + wanted > len(dataset):
                # after a resume with other flags: the data set is as long as today's flags take from its start
                found = (
                    f"{split} data: {count(len(dataset))} samples are fewer than the {count(consumed)} consumed so far "
                    f"and {count(wanted)} to come"
                )
                if split == "train":
                    raise DataError(
                        f"{found}; resume with the --global-batch-size of the run that was saved, or add --finetune to "
                        "begin with the first sample."
                    )
                logger.info(f"  {found}; after the last one evaluations begin with the first again")
                again = (single_batches(len(dataset), 0, *place) for _ in itertools.count())
                indices = itertools.chain(indices, itertools.chain.from_iterable(again))
        return batches(dataset, indices, num_workers=plan.loader_workers, pin=plan.device == "cuda")
