"""The data sets of a run and the streams of micro-batches drawn from them."""

from collections.abc import Iterator

from torch import Tensor

from megatron_lite.config.data_defaults import SPLIT
from megatron_lite.config.data_paths import with_files_read
from megatron_lite.config.plan import Plan
from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.data.external import ExternalLoader, Request
from megatron_lite.data.loader import batches
from megatron_lite.data.samplers import cyclic_batches, require_block, single_batches
from megatron_lite.errors import DataError
from megatron_lite.train.loop import Progress
from megatron_lite.units import count


class Feed:
    """Opens the data once. Each stream yields raw_BT1, one micro-batch of this rank after the other."""

    def __init__(self, plan: Plan, say):
        self.plan = plan
        external = plan.args.data.dataloader_type == "external"
        self._streams = _ExternalStreams(plan, say) if external else _DatasetStreams(plan, say)

    @property
    def has_validation(self) -> bool:
        return self._streams.has("valid")

    @property
    def has_test(self) -> bool:
        return self._streams.has("test")

    def training(self, progress: Progress) -> Iterator[Tensor]:
        """From the first sample that has not been trained on."""
        return self._streams.stream("train", progress.consumed)

    def validation(self, progress: Progress) -> Iterator[Tensor]:
        """From the first sample that earlier evaluations have not used."""
        w = self.plan.args.watch
        used = progress.iteration // w.eval_interval * w.eval_iters * self.plan.batch.final
        return self._streams.stream("valid", used)

    def test(self) -> Iterator[Tensor]:
        """From the start."""
        return self._streams.stream("test", 0)


class _DatasetStreams:
    """Streams of indexed data sets, or of mock data."""

    def __init__(self, plan: Plan, say):
        self.plan = plan
        d, w = with_files_read(plan.args.data), plan.args.watch
        evaluated = w.eval_iters * plan.batch.final
        # one evaluation per interval and one at the end, each on samples of its own
        evaluations = plan.train_iters // w.eval_interval + 1
        sizes = (0 if plan.args.training.skip_train else plan.train_samples, evaluations * evaluated, evaluated)
        self._sets = build_datasets(DataSpec(
            sizes=sizes,
            seq_length=plan.shape.seq_length, seed=plan.args.training.seed, vocab_size=plan.vocab_size,
            split=d.split or SPLIT, mock=d.mock_data, data_path=d.data_path, train_data_path=d.train_data_path,
            valid_data_path=d.valid_data_path, test_data_path=d.test_data_path, cache_path=d.data_cache_path,
        ), say)
        for name, size in zip(("train", "valid", "test"), sizes):
            samples = getattr(self._sets, name)
            why = f" (--split {d.split or SPLIT} leaves it no document)" if size and d.data_path else ""
            say(f"  {name} data: {count(len(samples))} samples" if samples is not None else f"  {name} data: none{why}")
            if samples is not None and len(samples) < size and d.dataloader_type == "single":
                flag = f"--{name}-data-path" if getattr(d, f"{name}_data_path") else "--data-path"
                raise DataError(f"{flag}: several data sets without weights are read once, and their {name} share of "
                                f"{count(len(samples))} samples is less than the {count(size)} that the run takes; give "
                                "each a weight, which repeats them, or train or evaluate less.")
            if samples is not None:
                require_block(len(samples), plan.args.training.micro_batch_size, plan.world.size)

    def has(self, split: str) -> bool:
        return getattr(self._sets, split) is not None

    def stream(self, split: str, consumed: int) -> Iterator[Tensor]:
        plan, d, dataset = self.plan, self.plan.args.data, getattr(self._sets, split)
        place = (len(dataset), consumed, plan.args.training.micro_batch_size, plan.world.rank, plan.world.size)
        if d.dataloader_type == "cyclic":
            indices = cyclic_batches(*place, data_sharding=d.data_sharding)
        else:
            indices = single_batches(*place)
        return batches(dataset, indices, num_workers=plan.loader_workers, pin=plan.device == "cuda")


class _ExternalStreams:
    """Streams of --external-dataloader; those of an evaluation begin at once, to see whether there are any."""

    def __init__(self, plan: Plan, say):
        t, d = plan.args.training, plan.args.data
        request = Request(t.micro_batch_size, plan.shape.seq_length, plan.world.rank, plan.world.size, t.seed)
        self._loader = ExternalLoader(d.external_dataloader, request, plan.vocab_size, pin=plan.device == "cuda")
        evaluated = ("valid", "test") if plan.args.watch.eval_iters else ()
        self._begun = {split: self._loader.stream(split, 0) for split in evaluated}
        for split in evaluated:
            say(f"  {split} data: {d.external_dataloader if self.has(split) else 'none'}")

    def has(self, split: str) -> bool:
        return self._begun.get(split) is not None

    def stream(self, split: str, consumed: int) -> Iterator[Tensor]:
        begun = self._begun.get(split)
        return begun if begun is not None and consumed == 0 else self._loader.stream(split, consumed)
