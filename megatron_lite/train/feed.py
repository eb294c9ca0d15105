"""The data sets of a run and the streams of micro-batches drawn from them."""

from collections.abc import Iterator

from torch import Tensor

from megatron_lite.config.data_defaults import SPLIT
from megatron_lite.config.plan import Plan
from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.data.loader import batches
from megatron_lite.data.samplers import cyclic_batches, single_batches
from megatron_lite.errors import DataError
from megatron_lite.train.loop import Progress
from megatron_lite.units import count


class Feed:
    """Opens the data once. Each stream yields raw_BT1, one micro-batch of this rank after the other."""

    def __init__(self, plan: Plan, say):
        self.plan = plan
        d, w = plan.args.data, plan.args.watch
        evaluated = w.eval_iters * plan.batch.final
        # one evaluation per interval and one at the end, each on samples of its own
        evaluations = plan.train_iters // w.eval_interval + 1
        sizes = (0 if plan.args.training.skip_train else plan.train_samples, evaluations * evaluated, evaluated)
        self._sets = build_datasets(DataSpec(
            sizes=sizes,
            seq_length=plan.shape.seq_length, seed=plan.args.training.seed, vocab_size=plan.vocab_size,
            split=d.split or SPLIT, mock=d.mock_data, data_path=d.data_path, train_data_path=d.train_data_path,
            valid_data_path=d.valid_data_path, test_data_path=d.test_data_path,
        ))
        for name, size in zip(("train", "valid", "test"), sizes):
            samples = getattr(self._sets, name)
            say(f"  {name} data: {count(len(samples))} samples" if samples is not None else f"  {name} data: none")
            if samples is not None and len(samples) < size and d.dataloader_type == "single":
                raise DataError(f"--data-path: several data sets without weights are read once, and their {name} share of "
                                f"{count(len(samples))} samples is less than the {count(size)} that the run takes; give "
                                "each a weight, which repeats them, or train or evaluate less.")

    @property
    def has_validation(self) -> bool:
        return self._sets.valid is not None

    @property
    def has_test(self) -> bool:
        return self._sets.test is not None

    def training(self, progress: Progress) -> Iterator[Tensor]:
        """From the first sample that has not been trained on."""
        return self._stream(self._sets.train, progress.consumed)

    def validation(self, progress: Progress) -> Iterator[Tensor]:
        """From the first sample that earlier evaluations have not used."""
        w = self.plan.args.watch
        return self._stream(self._sets.valid, progress.iteration // w.eval_interval * w.eval_iters * self.plan.batch.final)

    def test(self) -> Iterator[Tensor]:
        """From the start."""
        return self._stream(self._sets.test, 0)

    def _stream(self, dataset, consumed: int) -> Iterator[Tensor]:
        plan, d = self.plan, self.plan.args.data
        place = (len(dataset), consumed, plan.args.training.micro_batch_size, plan.world.rank, plan.world.size)
        if d.dataloader_type == "cyclic":
            indices = cyclic_batches(*place, data_sharding=d.data_sharding)
        else:
            indices = single_batches(*place)
        return batches(dataset, indices, num_workers=d.num_workers, pin=plan.device == "cuda")
