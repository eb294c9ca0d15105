"""Callbacks for the training loops of Hugging Face and Lightning, with the real packages; and Accelerate, which needs none."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import run_script
from support.paths import TESTS
from support.traces import steps_of
from support.watched_runs import PHASES, read_steps
from support.wording import wording
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCHES, ACCUMULATED = 10, 2


class Numbers(Dataset):
    """Of which a model learns the mean."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"numbers": torch.full((8,), float(at)), "labels": torch.tensor([float(at)])}


class Mean(nn.Module):
    """With a loss, as the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, numbers, labels):
        output = self.layer(numbers)
        return {"loss": (output - labels).square().mean(), "logits": output}


def check(folder: Path, updates: int, evaluated: list[int], saved: list[int]):
    """The run folder of a training of so many updates; evaluated, saved: after which steps."""
    steps = read_steps(folder)
    assert [one["step"] for one in steps] == [*range(1, updates + 1)] and steps_of(folder) == [3, 4]
    for one in steps[1:]:
        assert set(one["phases_ms"]) - {"eval", "save"} == PHASES
    for phase, after in (("eval", evaluated), ("save", saved)):
        assert [one["step"] - 1 for one in steps if phase in one["phases_ms"]] == [at for at in after if at < updates]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def train_with_transformers(folder: Path, callbacks: list, **more) -> tuple[Mean, list[float]]:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(1)
    arguments = TrainingArguments(
        output_dir=str(folder / "saved"), per_device_train_batch_size=4, gradient_accumulation_steps=ACCUMULATED,
        num_train_epochs=2, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = Trainer(Mean(), arguments, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=callbacks)
    trainer.train()
    return trainer.model, [one["loss"] for one in trainer.state.log_history if "loss" in one]


def test_hugging_face_trainer(tmp_path):
    pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    from megatron_lite.watch.callbacks import TransformersCallback

    kept = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 4}
    plain, losses = train_with_transformers(tmp_path, [], **kept)
    run = tmp_path / "run"
    model, again = train_with_transformers(tmp_path, [TransformersCallback(run, steps=range(3, 5))], **kept)
    assert losses == again and all(map(torch.equal, model.parameters(), plain.parameters()))
    check(run, BATCHES, evaluated=[5, 10], saved=[4, 8, 10])
    assert [one["loss"] for one in read_steps(run)] == pytest.approx(losses, rel=1e-3)


def test_training_may_begin_again_after_an_error(tmp_path, monkeypatch):
    pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    from megatron_lite.watch.callbacks import TransformersCallback

    callback, forward = TransformersCallback(tmp_path / "run", steps=range(3, 5)), Mean.forward

    def fail_inside_the_window(self, numbers, labels):
        return forward(self, numbers, 1 / 0 if callback.profiler._step == 4 else labels)

    monkeypatch.setattr(Mean, "forward", fail_inside_the_window)
    with pytest.raises(ZeroDivisionError):
        train_with_transformers(tmp_path, [callback])
    monkeypatch.setattr(Mean, "forward", forward)
    train_with_transformers(tmp_path, [callback])
    [before] = (tmp_path / "run").glob("run-*.json")
    assert json.loads(before.read_text())["status"] == wording("watch/failed-runtimeerror-training-was")
    assert len(read_steps(tmp_path / "run")) == BATCHES


@pytest.mark.parametrize("name", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_lightning(tmp_path, name):
    pytest.importorskip(name)
    script = f"""
import sys, torch
import {name} as lightning
sys.path[:0] = {[str(TESTS), str(Path(__file__).parent)]!r}
from test_watch_callbacks import ACCUMULATED, Mean, Numbers
from megatron_lite.watch.callbacks import LightningCallback
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean = Mean()
    def training_step(self, batch, at):
        return self.mean(**batch)["loss"]
    def validation_step(self, batch, at):
        self.log("loss", self.mean(**batch)["loss"])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
for callbacks in [], [LightningCallback(sys.argv[1] + "/run", steps=range(3, 5))]:
    lightning.seed_everything(1)
    module, loader = Module(), torch.utils.data.DataLoader(Numbers(), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", accumulate_grad_batches=ACCUMULATED, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=2,
    )
    trainer.fit(module, loader, loader)
    print("weights", module.mean.layer.weight.tolist())
"""
    plain, watched = (line for line in run_script(script, tmp_path).splitlines() if line.startswith("weights"))
    assert plain == watched
    check(tmp_path / "run", BATCHES, evaluated=[5, 10], saved=[])


def test_accelerate_needs_no_callback(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from megatron_lite import Profiler

    with Profiler(tmp_path, steps=range(3, 5)):
        accelerator, model = Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True), Mean()
        loader = DataLoader(Numbers(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
    check(tmp_path, BATCHES, evaluated=[], saved=[])


def test_the_packages_are_imported_when_a_callback_is_asked_for():
    code = "import sys, megatron_lite.watch.callbacks\nassert not {'transformers', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    callbacks = importlib.import_module("megatron_lite.watch.callbacks")
    with pytest.raises(AttributeError, match="has no attribute KerasCallback"):
        callbacks.KerasCallback  # noqa: B018
