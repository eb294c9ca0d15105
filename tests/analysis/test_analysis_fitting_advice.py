"""Advice fits what was seen: the direction of copies, what is searched for, what comes once, and what is told already."""

import pytest
from planted_causes import Loop, SavesEachStep

from megatron_lite.analysis.analyze import analyze


def findings(folder, made):
    """The report's findings by code."""
    made.write(folder)
    return {one.code: one for one in analyze([folder]).findings}


class Searches(Loop):
    """cuDNN tries its algorithms for a convolution, or torch compiles, in each step."""

    what = "cudnnFindConvolutionForwardAlgorithmEx"

    def layer(self, number, index):
        if index == 0:
            start, end = self.place.gap(8_000)
            self.made.op(self.what, start, end)
        super().layer(number, index)


class Compiles(Searches):
    what = "_compile.compile_inner (dynamo_timed)"


def test_a_search_for_algorithms_is_no_compilation(tmp_path):
    found = findings(tmp_path / "search", Searches().make())["recompilation"]
    assert "cudnn.benchmark" in found.advice and "TORCH_LOGS" not in found.advice
    assert not found.certain and not found.flags and found.cost_ms == pytest.approx(8.0, rel=0.01)
    found = findings(tmp_path / "compile", Compiles().make())["recompilation"]
    assert "TORCH_LOGS" in found.advice and found.certain


class CopiesBefore(Loop):
    """8 copies of half a millisecond, while nothing computes."""

    name = ""
    around = ""

    def layer(self, number, index):
        if index == 0:
            began = self.host
            for at in range(8):
                start = self.gpu + 500 * at
                self.made.copy(self.name, start, start + 500, began + 100 * at, 200 << 20)
            self.place.host += 1_000
            self.place.gpu += 4_000
            if self.around:
                self.made.annotation(self.around, began - 1, self.host)
        super().layer(number, index)


@pytest.mark.parametrize(
    ("name", "around", "advice"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "", "keep results on the device"),
        ("Memcpy PtoP (Device -> Device)", "DataParallel.forward", "DistributedDataParallel"),
        ("Memcpy PtoP (Device -> Device)", "DistributedDataParallel.forward", "between GPUs"),
        ("Memcpy DtoD (Device -> Device)", "", "within the device"),
        ("Memcpy HtoD (Pinned -> Device)", "", "pinned memory on a separate stream"),
    ],
)
def test_advice_on_copies_fits_where_they_go(tmp_path, name, around, advice):
    made = CopiesBefore()
    made.name = name
    made.around = around
    found = findings(tmp_path, made.make())["exposed-copies"]
    assert advice in found.advice and found.cost_ms == pytest.approx(4.0, rel=0.01)


class SavesOnce(SavesEachStep):
    def after(self, number):
        if number == 3:
            super().after(number)


def test_a_single_checkpoint_is_no_cost_of_each_step(tmp_path):
    found = findings(tmp_path / "once", SavesOnce().make(8))["save-in-step"]
    assert found.cost_ms is None and found.once_ms == pytest.approx(20.0, rel=0.01) and not found.certain
    found = findings(tmp_path / "each", SavesEachStep().make(8))["save-in-step"]
    assert found.once_ms is None and found.cost_ms == pytest.approx(20.0, rel=0.05)


class Unused(Loop):
    """DistributedDataParallel searches for unused parameters; beside the device's work or while it idles."""

    idle = True

    def backward_layer(self, number, index):
        if index == 0:
            start, end = self.place.gap(1_200) if self.idle else (self.host, self.host + 1_200)
            self.made.op("torch.distributed.ddp.reducer::search_unused_parameters", start, end)
        super().backward_layer(number, index)


def test_a_search_for_unused_parameters_is_told_once(tmp_path):
    found = findings(tmp_path / "idle", Unused().make())
    assert found["unused-parameters"].cost_ms == pytest.approx(1.2, rel=0.02) and "host-gaps" not in found
    hidden = Unused()
    hidden.idle = False
    found = findings(tmp_path / "hidden", hidden.make())
    assert (found["unused-parameters"].cost_ms or 0.0) < 0.5
