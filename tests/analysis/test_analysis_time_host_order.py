"""What the host did is the same in every run: Python's sets of names have another order in each process."""

from support.trace_maker import MadeTrace, place

from megatron_lite.analysis.time.host_causes import find_host_work

LOADERS = {
    "PyTorch's DataLoader": "torch/utils/data/dataloader.py(701): __next__",
    "NVIDIA DALI": "nvidia/dali/plugin/pytorch/__init__.py(235): __next__",
    "webdataset": "webdataset/pipeline.py(70): iterator",
    "FFCV": "ffcv/loader/epoch_iterator.py(142): __next__",
    "tf.data": "tensorflow/python/data/ops/iterator_ops.py(826): __next__",
}


def test_works_of_one_cause_are_in_the_order_in_which_their_names_appear(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 10_000)
    for number, frame in enumerate(LOADERS.values()):
        made.frame(frame, number * 1_000, number * 1_000 + 900)
    trace, placing = place(made, tmp_path)
    works = find_host_work(trace, [placing.main_thread])
    assert [work.what for work in works if work.cause == "data_wait"] == list(LOADERS)
