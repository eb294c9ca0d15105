"""Megatron's torch file without Megatron: the same tensors out as in, the names of all its ages, and no code run."""

import argparse
import dataclasses
import io
import os
import pickle
import random
import signal
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import same
from support.megatron_core import read_all
from support.megatron_folders import rewrite, trained, written
from support.model_variants import VARIANTS, build
from support.wording import wording
from torch import nn

from megatron_lite.checkpoint.megatron_file import MegatronFile
from megatron_lite.checkpoint.megatron_names import file_name, in_file_order, ours
from megatron_lite.checkpoint.random_states import from_megatron, to_megatron
from megatron_lite.checkpoint.unpickle import Inert, load
from megatron_lite.config.layout import Block, Part
from megatron_lite.errors import CheckpointError


def random_states(ranks: int, cuda: bool) -> dict:
    """Of generators that were used, with a Gaussian kept on odd ranks."""
    flat = {}
    for rank in range(ranks):
        python, numpy = random.Random(rank), np.random.RandomState(rank)
        if rank % 2:
            python.gauss(0, 1), numpy.standard_normal()
        version, internal, gauss = python.getstate()
        _, keys, position, has_gauss, cached = numpy.get_state()
        states = {
            "python": torch.tensor([version, *internal, int(gauss is not None)]),
            "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
            "gauss": torch.tensor([gauss or 0.0, cached], dtype=torch.float64),
            "torch": torch.Generator().manual_seed(rank).get_state(),
        } | ({"cuda": torch.full((16,), rank, dtype=torch.uint8)} if cuda else {})
        flat |= {f"random.{rank}.{kind}": state for kind, state in states.items()}
    return flat


def write_trained(folder: Path, precision: str, *words: str, **how) -> tuple[Path, dict]:
    """The file of a run, and its flat tensors."""
    plan, record, tensors = trained(precision, *words, **how)
    return written(place(folder), record, tensors, plan), tensors


def place(folder: Path) -> Path:
    return folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
@pytest.mark.parametrize("words", ["fp32", "bf16", "fp16", "fp32 --optimizer sgd"])
@pytest.mark.parametrize("cuda", [False, True])
def test_what_was_written_is_read_bitwise(impl, words, cuda, tmp_path):
    precision, _, more = words.partition(" ")
    plan, record, tensors = trained(precision, more, f"--transformer-impl {impl}")
    record, tensors = dataclasses.replace(record, ranks=3), tensors | random_states(3, cuda)
    file = MegatronFile(written(place(tmp_path), record, tensors, plan))
    assert file.record == record and file.without_optimizer is None
    assert same(read_all(file), tensors)


def test_without_optimizer_and_random_states(tmp_path):
    plan, record, tensors = trained("bf16")
    record = dataclasses.replace(record, optimizer=None)
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    file = MegatronFile(written(place(tmp_path), record, weights, plan))
    assert file.record == record and same(read_all(file), weights)
    assert file.without_optimizer == wording("checkpoint/was-not-saved", "--no-save-optim")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_arguments_in_the_file_describe_the_model(variant, tmp_path):
    """Without our mark it is a file of Megatron-LM: shape, schedule and samples must follow from its own keys."""
    plan, record, tensors = trained("fp32", variant=variant, steps=1)
    if not record.shape["linear_bias"]:  # there is no tanh without the fused kernel
        record.shape["activation"] = "gelu_erf"
    path = rewrite(written(place(tmp_path), record, tensors, plan))
    expected = dataclasses.replace(record, vocab_size=None, trainer="Megatron-LM", versions={})
    assert MegatronFile(path).record == expected


@pytest.mark.parametrize(
    "words",
    [
        "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style cosine",
        "--lr-decay-style inverse-square-root --lr-warmup-init 1e-5",
        "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
    ],
)
def test_every_schedule_is_mapped_back(words, tmp_path):
    plan, record, tensors = trained("fp32", words, steps=1)
    path = rewrite(written(place(tmp_path), record, tensors, plan))
    assert MegatronFile(path).record.schedule == record.schedule

    def forget(state):
        if record.schedule["style"] == "WSD":
            state["args"].lr_wsd_decay_iters = None
        else:
            del state["opt_param_scheduler"]["lr_decay_style"]

    path = rewrite(path, forget, foreign=False)
    assert MegatronFile(path).record.schedule is None, "what is not there is not made up"


# Order and names as a checkpoint of Megatron-LM with Transformer Engine lists them
FUSED = """
self_attention.linear_proj self_attention.linear_qkv.layer_norm self_attention.linear_qkv self_attention.q_layernorm
self_attention.k_layernorm mlp.linear_fc1.layer_norm mlp.linear_fc1 mlp.linear_fc2
"""


def test_transformer_engines_names_and_order():
    held = [name for name, _ in build(VARIANTS["qk_layernorm"]).named_parameters()]
    names = [file_name(name, fused=True) for name in in_file_order(held, fused=True)]
    in_layers = [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in FUSED.split()]
    assert [name.replace("layer_norm_", "layer_norm.") for name in names] == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"{name}.{kind}" for name in [*in_layers, "decoder.final_layernorm"] for kind in ("weight", "bias")),
    ]
    assert sorted(ours(name) for name in names) == sorted(held)
    tenth, ninth = (f"decoder.layers.{layer}.mlp.linear_fc2.bias" for layer in (10, 9))
    assert in_file_order([tenth, ninth], True) == [ninth, tenth]


def test_transformer_engines_adam_counts_steps_per_group(tmp_path):
    """Its load_state_dict knows no per-parameter "step"; torch's knows nothing else."""
    for impl, per_parameter in (("transformer_engine", False), ("local", True)):
        state = torch.load(write_trained(tmp_path, "bf16", f"--transformer-impl {impl}")[0], weights_only=False)
        inner = state["optimizer"]["optimizer"]
        assert [group["step"] for group in inner["param_groups"]] == [3, 3]
        assert all(("step" in entry) == per_parameter for entry in inner["state"].values())


def test_extra_states_and_buffers_are_no_weights(tmp_path):
    path, tensors = write_trained(tmp_path, "fp32")
    more = {
        "decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(8, dtype=torch.uint8),
        "decoder.layers.0.mlp.linear_fc2._extra_state": io.BytesIO(b"fp8"),
        "decoder.layers.1.mlp.linear_fc2._extra_state": b"fp8",
        "rotary_pos_emb.inv_freq": torch.ones(4),
    }
    path = rewrite(path, lambda state: state["model"].update(more))
    assert same(read_all(MegatronFile(path)), tensors)


OLD = [
    ("embedding.", "language_model.embedding."),
    ("decoder.final_layernorm", "language_model.encoder.final_layernorm"),
    ("decoder.layers", "language_model.encoder.layers"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
    ("self_attention.linear_qkv", "attention.query_key_value"),
    ("self_attention.linear_proj", "attention.dense"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
]
NEWER = [
    ("final_layernorm", "final_norm"),
    ("input_layernorm", "input_norm"),
    (".attention.", ".self_attention."),
    ("post_attention_layernorm", "post_attention_norm"),
]


def nested(names: dict) -> dict:
    """{"a.b.weight": x} -> {"a": {"b": {"weight": x}}}, down to what Megatron nested."""
    tree: dict = {}
    for name, value in names.items():
        *path, leaf = name.split(".", 2 if ".encoder." in name else 3)
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = value
    return tree


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_files_from_before_megatron_core(version, newer, tmp_path):
    plan, record, tensors = trained("fp32", "--transformer-impl local", variant="gelu_tanh")
    path = written(place(tmp_path), record, tensors, plan)
    state = torch.load(path, weights_only=False)
    del state["megatron_lite"]
    model = {name: tensor for name, tensor in state["model"].items() if tensor is not None}
    heads = record.shape["num_attention_heads"]
    for number, (name, weight) in enumerate(in_groups(model)):
        entry = state["optimizer"]["state"][number]
        if "linear_qkv" in name:
            model[name] = as_it_was(weight, version, heads)
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = as_it_was(entry[key], version, heads)
    for new, old in [*OLD, *(NEWER if newer else [])]:
        model = {name.replace(new, old): tensor for name, tensor in model.items()}
    state["model"], state["checkpoint_version"] = nested(model), version
    assert "language_model" in state["model"]
    torch.save(state, path)
    file = MegatronFile(path)
    assert same(read_all(file), tensors)


def in_groups(model: dict) -> list:
    return sorted(model.items(), key=lambda item: item[1].ndim == 1)  # stable: matrices, then vectors


def as_it_was(qkv: torch.Tensor, version: float, heads: int) -> torch.Tensor:
    """[heads, 3, width] rows as version 0 had them, [3, heads, width], or version 1, [heads, width, 3]."""
    today = qkv.view(heads, 3, -1, *qkv.shape[1:])
    order = {0: (1, 0, 2), 1.0: (0, 2, 1)}.get(version, (0, 1, 2))
    return today.permute(*order, *range(3, today.ndim)).reshape(qkv.shape)


def test_random_states_are_pythons_and_numpys_own(tmp_path):
    """What Megatron would set, and what comes back, after a pass through a file."""
    flat = {name.removeprefix("random.1."): state for name, state in random_states(2, True).items() if ".1." in name}
    entry = to_megatron(flat, seed=5)
    torch.save({"x": entry}, tmp_path / "x.pt")
    assert same(from_megatron(load(tmp_path / "x.pt")["x"]), flat)
    python, numpy = random.Random(), np.random.RandomState()
    python.setstate(entry["random_rng_state"])
    numpy.set_state(entry["np_rng_state"])
    expected_python, expected_numpy = random.Random(1), np.random.RandomState(1)
    expected_python.gauss(0, 1), expected_numpy.standard_normal()
    assert [python.gauss(0, 1) for _ in range(3)] == [expected_python.gauss(0, 1) for _ in range(3)]
    assert same(numpy.standard_normal(3).tolist(), expected_numpy.standard_normal(3).tolist())
    streams = entry["rng_tracker_states"]  # Megatron leaves if there are none
    assert {name: state.view(torch.int64).tolist() for name, state in streams.items()} == {
        "data-parallel-rng": [5, 0],
        "model-parallel-rng": [2723, 0],
        "expert-parallel-rng": [1029, 0],
    }


def test_a_foreign_files_random_states_are_left_alone(tmp_path):
    plan, record, tensors = trained("fp32")
    record, tensors = dataclasses.replace(record, ranks=1), tensors | random_states(1, False)
    file = MegatronFile(rewrite(written(place(tmp_path), record, tensors, plan)))
    assert file.record.ranks == 0 and not [name for name in file.names() if name.startswith("random.")]


# ---- what a file may name


def foreign_class(module: str, name: str) -> type:
    """A class as a file refers to it, importable only while it is written."""
    sys.modules.setdefault(module, types.ModuleType(module))
    made = type(name, (), {"__module__": module, "__init__": lambda self: None})
    setattr(sys.modules[module], name, made)
    return made


class Trap:
    """Unpickled, it would leave a file behind."""

    def __init__(self, function, *arguments):
        self.called = (function, arguments)

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize("where", ["args", "model", "top"])
@pytest.mark.parametrize("kind", ["os.mkdir", "eval", "setattr", "own"])
def test_a_trap_does_not_snap(where, kind, tmp_path):
    snapped = tmp_path / "snapped"
    traps = {
        "os.mkdir": (Trap(os.mkdir, str(snapped)), "posix.mkdir"),
        "eval": (Trap(eval, f"__import__('os').mkdir({str(snapped)!r})"), "builtins.eval"),
        "setattr": (Trap(setattr, argparse.Namespace, "x", 1), "builtins.setattr"),
        "own": (foreign_class("somebody", "Model")(), "somebody.Model"),
    }
    trap, name = traps[kind]

    def set_trap(state):
        place_of = {"args": vars(state["args"]), "model": state["model"], "top": state}
        place_of[where]["trap"] = trap

    path = rewrite(write_trained(tmp_path, "fp32", steps=1)[0], set_trap, foreign=False)
    with pytest.raises(CheckpointError) as caught:
        MegatronFile(path)
    assert not snapped.exists()
    assert wording("checkpoint/names-which-is-neither", path, name) in str(caught.value) and "\n" not in str(
        caught.value
    )


def test_what_accepted_names_stand_for_is_never_looked_up(tmp_path, monkeypatch):
    """Classes, which need not be there, functions, and members of enums as Python 3.11.2 pickles them: getattr(class, name)."""
    modules, calls = ("megatron_patch", "transformer_engine", "apex", "megatron"), []
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def spring(*given):
        calls.append(given)

    spring.__module__, spring.__qualname__, sys.modules["megatron"].spring = "megatron", "spring", spring

    def set_traps(state):
        args = state["args"]
        for name in modules:
            setattr(args, name, foreign_class(name, "Thing")())
        args.exit_signal, args.folder, args.more = signal.SIGTERM, tmp_path, types.SimpleNamespace(a=1)
        args.attention_backend = Trap(getattr, foreign_class("megatron", "Backend"), "__name__")
        args.trap = Trap(spring, "x")

    path, tensors = write_trained(tmp_path, "fp32", steps=1)
    rewrite(path, set_traps, foreign=False)
    for name in modules[:-1]:
        del sys.modules[name]
    assert isinstance(load(path)["args"].attention_backend, Inert)
    assert same(read_all(MegatronFile(path)), tensors)
    assert calls == [] and not [name for name in modules[:-1] if name in sys.modules]


# ---- what cannot be loaded


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        MegatronFile(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--load {path}: ")
    return str(caught.value)


def changed(folder: Path, change) -> Path:
    return rewrite(write_trained(folder, "bf16", steps=1)[0], change)


def test_damaged_missing_and_other_files(tmp_path):
    assert wording("checkpoint/there-is-no-such") in refusal(place(tmp_path))
    whole = changed(tmp_path, lambda state: None)
    data = whole.read_bytes()
    for damaged in (b"", b"no zip", data[:1000], data[: len(data) // 2]):
        whole.write_bytes(damaged)
        assert wording("checkpoint/cannot-be-read") in refusal(whole) and "damaged" in refusal(whole)
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"model": 1}, protocol=4)[:-3])
    assert wording("checkpoint/cannot-be-read") in refusal(whole)
    torch.save([1, 2], whole)
    assert wording("checkpoint/holds-list-not-checkpoint") in refusal(whole)
    torch.save({"model": nn.Linear(2, 2).state_dict()}, whole)
    assert wording("checkpoint/has-not-form-of") in refusal(whole)
    torch.save({"args": argparse.Namespace(), "model": {}}, whole)
    assert "KeyError: 'embedding.word_embeddings.weight'" in refusal(whole)


def make_old(state):
    """Seven heads do not divide an old file's QKV."""
    state["checkpoint_version"], state["args"].num_attention_heads = 0, 7


PARTS = "not 1 x 1 x 1; give the folder of all of its parts"
REFUSED = {
    "tensor": (lambda state: setattr(state["args"], "tensor_model_parallel_size", 2), PARTS),
    "pipeline": (lambda state: setattr(state["args"], "pipeline_model_parallel_size", 2), PARTS),
    "virtual": (lambda state: setattr(state["args"], "virtual_pipeline_model_parallel_size", 2), "KeyError: 'model0'"),
    "expert": (lambda state: setattr(state["args"], "expert_model_parallel_size", 2), PARTS),
    "argument": (lambda state: delattr(state["args"], "num_layers"), "'args.num_layers'"),
    "shape": (make_old, "has not the form of a checkpoint"),
    "memory": (
        lambda state: state.update(bomb=Trap(bytearray, 2**31)),
        "asks for far more memory than its size explains",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    change, message = REFUSED[kind]
    assert message in refusal(changed(tmp_path, change))


def test_old_spellings_of_arguments(tmp_path):
    def change(state):
        args = state["args"]
        args.layernorm_epsilon, args.add_position_embedding, args.consumed_train_samples = 1e-3, False, None
        del args.norm_epsilon, args.group_query_attention, args.fp16
        state["total_iters"] = state.pop("iteration")
        state["lr_scheduler"] = state.pop("opt_param_scheduler")
        state["lr_scheduler"]["num_iters"] = state["lr_scheduler"].pop("num_steps")

    record = MegatronFile(changed(tmp_path, change)).record
    assert (record.iteration, record.consumed) == (1, 4)
    assert record.shape["norm_epsilon"] == 1e-3 and record.shape["position_embedding"] == "none"
    assert record.shape["num_query_groups"] == 4
    change_to_rope = changed(tmp_path, lambda state: setattr(state["args"], "use_rotary_position_embeddings", True))
    assert MegatronFile(change_to_rope).record.shape["position_embedding"] == "rope"


def test_newer_spellings_of_arguments(tmp_path):
    """Norms stored minus one are another model, whatever their argument is called."""
    path, _ = write_trained(tmp_path, "fp32", variant="gqa_swiglu_rmsnorm", steps=1)

    def rename(state):
        del state["args"].apply_layernorm_1p
        state["args"].layernorm_zero_centered_gamma = True

    assert MegatronFile(rewrite(path, rename)).record.shape["layernorm_1p"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_rope_freq", 4),
        ("fp32_residual_connection", True), ("softmax_scale", 1.0), ("quick_geglu", True),
        ("position_embedding_type", "mrope"), ("normalization", "L2Norm"), ("moe_latent_size", 8), ("qk_l2_norm", True),
        ("gated_linear_unit", True), ("num_experts", 8),
    ],
)  # fmt: skip
def test_arguments_that_change_the_function_are_refused(name, value, tmp_path):
    path, _ = write_trained(tmp_path, "fp32", variant="gelu_tanh", steps=1)
    rewrite(path, lambda state: setattr(state["args"], name, value))
    with pytest.raises(CheckpointError, match=name if name != "num_experts" else "add_bias_linear=True of experts"):
        MegatronFile(path)


def test_experts_in_a_file_are_refused_with_the_format_that_is_read(tmp_path):
    path, _ = write_trained(tmp_path, "fp32", variant="no_bias", steps=1)
    rewrite(path, lambda state: setattr(state["args"], "num_experts", 8))
    with pytest.raises(CheckpointError, match="with --ckpt-format torch_dist"):
        MegatronFile(path)


def test_arguments_that_change_nothing_are_taken(tmp_path):
    path, _ = write_trained(tmp_path, "fp32", variant="gelu_tanh", steps=1)
    width = MegatronFile(path).record.shape["kv_channels"]
    harmless = {"window_size": None, "softmax_type": "vanilla", "softmax_scale": width**-0.5, "mtp_num_layers": 0}
    rewrite(path, lambda state: vars(state["args"]).update(harmless))
    assert MegatronFile(path).record.trainer == "Megatron-LM"


def test_a_record_of_another_version(tmp_path):
    plan, record, tensors = trained("fp32", steps=1)
    path = written(place(tmp_path), dataclasses.replace(record, format=99), tensors, plan)
    assert "format 99, not 2" in refusal(path)


def test_what_is_asked_for_must_be_there_and_fit(tmp_path):
    path = changed(tmp_path, lambda state: None)
    file = MegatronFile(path)
    with pytest.raises(CheckpointError, match=r"lacks 1 of the tensors .*, such as model\.nothing; give the flags"):
        file.read_into({"model.nothing": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"has the shape \[32\], and the run's is \[64\]"):
        file.read_into({"model.decoder.final_layernorm.weight": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"has the shape \[128, 32\], and the run's is \[256, 64\]"):
        file.read_into({"model.embedding.word_embeddings.weight": torch.zeros(256, 64)})


def test_a_vocabulary_table_may_be_padded_otherwise(tmp_path):
    name = "model.embedding.word_embeddings.weight"
    file = MegatronFile(changed(tmp_path, lambda state: None))
    whole = file.tensor(name)
    larger, smaller = torch.ones(256, 32), torch.ones(100, 32)
    file.read_into({name: larger})
    file.read_into({name: smaller})
    assert torch.equal(larger[:128], whole) and not larger[128:].any()
    assert torch.equal(smaller, whole[:100])
    # two tensor parallel ranks of a table with 256 rows: all stored rows are the first one's
    for first, expected in ((0, whole), (128, torch.zeros(128, 32))):
        target = torch.ones(128, 32)
        file.read_into({name: target}, {name: Part((256, 32), (Block((first, 0), (128, 32)),))})
        assert torch.equal(target, expected)


def without_state(state):
    del state["optimizer"]["optimizer"]["state"]


def swapped(state):
    groups = state["optimizer"]["optimizer"]["param_groups"]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def transposed(state):
    groups = state["optimizer"]["optimizer"]["param_groups"]
    groups[0]["params"][:2] = reversed(groups[0]["params"][:2])


def shortened(state):
    inner = state["optimizer"]["optimizer"]
    inner["state"].clear()
    inner["param_groups"][0]["params"].pop()


NO_ORDER = "numbers its parameters in an order that does not fit these weights"


@pytest.mark.parametrize(
    "change, why",
    [
        (transposed, NO_ORDER),
        (shortened, NO_ORDER),
        (swapped, NO_ORDER),
        (without_state, "lies in distrib_optim.pt (--use-distributed-optimizer), which is not there"),
        (lambda state: state.update(optimizer=[{}, {}]), "is made of 2 chained ones"),
        (lambda state: state.update(optimizer={"state": 1}), "has a form that is not known here"),
        (lambda state: state.pop("optimizer"), "was not saved (--no-save-optim)"),
    ],
)
def test_an_optimizer_that_cannot_be_named_leaves_the_weights(change, why, tmp_path):
    file = MegatronFile(changed(tmp_path, change))
    assert file.record.optimizer is None and file.without_optimizer == why
    assert file.names() and all(name.startswith("model.") for name in file.names())


def test_megatrons_own_check_of_the_arguments(tmp_path):
    """What check_checkpoint_args compares, and what load_checkpoint takes on from the arguments."""
    path, _ = write_trained(tmp_path, "bf16", "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64")
    state = torch.load(path, weights_only=False)
    args = vars(state["args"])
    expected = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "add_position_embedding": True,
        "max_position_embeddings": 16,
        "make_vocab_size_divisible_by": 64,
        "padded_vocab_size": 128,
        "tokenizer_type": "NullTokenizer",
        "data_parallel_random_init": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 12,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 8,
        "params_dtype": torch.bfloat16,
    }
    assert {name: args[name] for name in expected} == expected
    assert state["checkpoint_version"] == 3.0 and state["iteration"] == 3
    assert state["num_floating_point_operations_so_far"] > 1e6


def test_a_view_is_written_alone(tmp_path):
    """A weight inside a flat buffer must not take the whole buffer into the file."""
    plan, record, tensors = trained("fp32", steps=1)
    plain = written(place(tmp_path), record, tensors, plan).stat().st_size
    buffer = torch.zeros(1_000_000)
    name = "model.decoder.final_layernorm.weight"
    view = buffer[: tensors[name].numel()].copy_(tensors[name])
    path = written(place(tmp_path), record, tensors | {name: view}, plan)
    assert path.stat().st_size < plain + 1000
    assert same(read_all(MegatronFile(path)), tensors)
