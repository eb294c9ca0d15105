"""Checkpoints of tensor- and pipeline-parallel runs of Megatron, read as one model."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
from support.launch import same
from support.megatron_core import read_all
from support.megatron_folders import trained, written
from support.model_variants import VARIANTS
from support.wording import wording

from megatron_lite.checkpoint.find import open_megatron
from megatron_lite.checkpoint.megatron_file import MegatronFile
from megatron_lite.errors import CheckpointError

CASES = [("fp32", "gelu_tanh"), ("bf16", "gqa_swiglu_rmsnorm"), ("fp32", "untied"), ("fp16", "qk_layernorm")]


def share(name: str, tensor: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """A tensor-parallel rank's part of a weight, as Megatron's layers are described."""
    if tensor.ndim == 0:
        return tensor
    if gated and "linear_fc1" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if any(kind in name for kind in ("linear_qkv.", "linear_fc1.", "word_embeddings.weight", "output_layer.weight")):
        return tensor.chunk(ranks)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor


def stage_names(names: list[str], stage: int, stages: int, tied: bool, chunks: int, layers: int) -> dict[str, str]:
    """{name in the stage, whose layers count on over its chunks: name in the whole}."""
    if stages == 1:
        return {name: name for name in names}
    each, last = layers // (stages * chunks), stages - 1
    mine = [(chunk * stages + stage) * each + layer for chunk in range(chunks) for layer in range(each)]
    held = {}
    for name in names:
        match = re.search(r"\.layers\.(\d+)\.", name)
        if match and int(match[1]) in mine:
            held[name.replace(match[0], f".layers.{mine.index(int(match[1]))}.")] = name
        elif not match and stage in (0, last) and name.startswith("embedding.") == (stage == 0):
            held[name] = name
    return held | ({"output_layer.weight": "embedding.word_embeddings.weight"} if tied and stage == last else {})


def in_chunks(model: dict[str, torch.Tensor], chunks: int) -> dict[str, dict]:
    """What a stage's file has: "model", or "model0" and so on, in each of which layers count from 0."""
    if chunks == 1:
        return {"model": model}
    found = {f"model{chunk}": {} for chunk in range(chunks)}
    each = len({name.split(".")[2] for name in model if ".layers." in name}) // chunks
    for name, weight in model.items():
        chunk = 0 if name.startswith("embedding.") else chunks - 1
        if ".layers." in name:
            layer = name.split(".")[2]
            chunk, within = divmod(int(layer), each)
            name = name.replace(f".layers.{layer}.", f".layers.{within}.")
        found[f"model{chunk}"][name] = weight
    return found


def spread(folder: Path, precision: str, variant: str, ranks: int, stages: int, chunks: int = 1):
    """(record, flat tensors) of a run whose file is cut into ranks x stages."""
    plan, record, tensors = trained(precision, variant=variant)
    activation, tied, layers = (record.shape[name] for name in ("activation", "tied_embeddings", "num_layers"))
    names = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
    alike = {name: value for name, value in tensors.items() if name.startswith(("optimizer.good", "loss_scale."))}
    for rank, stage in itertools.product(range(ranks), range(stages)):
        part = dict(alike)
        for mine, name in stage_names(names, stage, stages, tied, chunks, layers).items():
            for form in (
                "model.{}",
                *(f"optimizer.{{}}.{kind}" for kind in ("master", "step", "exp_avg", "exp_avg_sq")),
            ):
                if form.format(name) in tensors:
                    cut = share(name, tensors[form.format(name)], rank, ranks, activation == "swiglu")
                    part[form.format(mine)] = cut.clone()
        place = folder / (f"mp_rank_{rank:02d}_{stage:03d}" if stages > 1 else f"mp_rank_{rank:02d}")
        state = torch.load(written(place / "model_optim_rng.pt", record, part, plan), weights_only=False)
        del state["megatron_lite"]
        state |= in_chunks({name: weight for name, weight in state.pop("model").items() if weight is not None}, chunks)
        state["args"].tensor_model_parallel_size, state["args"].pipeline_model_parallel_size = ranks, stages
        state["args"].virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        torch.save(state, place / "model_optim_rng.pt")
    return record, tensors


@pytest.mark.parametrize("precision, variant", CASES)
@pytest.mark.parametrize("ranks, stages", [(2, 1), (1, 2), (2, 2)])
def test_parts_make_the_whole(precision, variant, ranks, stages, tmp_path):
    record, tensors = spread(tmp_path, precision, variant, ranks, stages)
    file = open_megatron(tmp_path)
    assert file.without_optimizer is None
    assert same(read_all(file), tensors)
    assert file.record == dataclasses.replace(record, vocab_size=None, trainer="Megatron-LM", versions={})


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 2), (2, 2), (1, 1)])
def test_interleaved_stages_make_the_whole(ranks, chunks, tmp_path):
    record, tensors = spread(tmp_path, "bf16", "four_layers", ranks, 2, chunks)
    file = open_megatron(tmp_path)
    assert file.without_optimizer is None and file.record.shape == record.shape and same(read_all(file), tensors)


def test_chunks_that_lack_layers(tmp_path):
    spread(tmp_path, "fp32", "four_layers", 1, 2, 2)
    path = tmp_path / "mp_rank_00_001" / "model_optim_rng.pt"
    part = torch.load(path, weights_only=False)
    part["model1"] = {name: weight for name, weight in part["model1"].items() if ".layers." not in name}
    torch.save(part, path)
    with pytest.raises(CheckpointError, match="its stages have 2, 1 layers, not the 4 of the model"):
        open_megatron(tmp_path)


def test_a_whole_one_is_opened_as_itself(tmp_path):
    plan, record, tensors = trained("fp32")
    written(tmp_path / "mp_rank_00" / "model_optim_rng.pt", record, tensors, plan)
    file = open_megatron(tmp_path)
    assert type(file) is MegatronFile and file.record == record


def test_an_optimizer_missing_in_one_part_is_missing(tmp_path):
    spread(tmp_path, "fp32", "gelu_tanh", 2, 1)
    path = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    part = torch.load(path, weights_only=False)
    del part["optimizer"]
    torch.save(part, path)
    file = open_megatron(tmp_path)
    assert file.record.optimizer is None and file.without_optimizer == wording(
        "checkpoint/was-not-saved", "--no-save-optim"
    )
    assert all(name.startswith("model.") for name in file.names())


def test_parts_that_do_not_belong_together(tmp_path):
    spread(tmp_path, "fp32", "gelu_tanh", 2, 2)
    (tmp_path / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="holds 3 of 4 parts of a model; copy the rest"):
        open_megatron(tmp_path)
    for stage in range(2):
        (tmp_path / f"mp_rank_01_{stage:03d}" / "model_optim_rng.pt").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="is of a model in 2 x 2 x 1 parts .*, not 1 x 2 x 1; give the folder"):
        open_megatron(tmp_path)
    (tmp_path / "mp_rank_00_000_001").mkdir()
    (tmp_path / "mp_rank_00_000_001" / "model_optim_rng.pt").touch()
    with pytest.raises(CheckpointError, match="holds mp_rank_00_000_001, a part of a mixture of experts"):
        open_megatron(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_megatron(tmp_path)


def test_the_variants_cover_both_splits_of_fc1():
    assert {VARIANTS[variant].activation == "swiglu" for _, variant in CASES} == {True, False}
