"""FP8 of linear layers on paper: what changes of the bound and of memory, and what of it is not known."""

import pytest
from support.command_lines import argv, plan_on_paper
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.cli.planned_flags import take_fp8
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.config.fp8 import list_fp8_mistakes
from megatron_lite.config.model_size import count_parameter_parts
from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import plan_batch, predict_memory
from megatron_lite.planner.search import search
from megatron_lite.planner.state_size import list_states
from megatron_lite.planner.step_time import predict_time
from megatron_lite.planner.traffic import GATHER, list_exchanges

MODEL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 16 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
)
HYBRID = "--fp8-format hybrid"
TENSORWISE, MXFP8, BLOCKWISE = (f"{HYBRID} --fp8-recipe {recipe}" for recipe in ("tensorwise", "mxfp8", "blockwise"))
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256"
ZERO1, ZERO3 = "--use-distributed-optimizer", "--use-torch-fsdp2"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
ONE, TWO = World(gpus=1), World(size=2, local_size=2, gpus=2)


def make(changes: str = "", world: World = ONE) -> Plan:
    return plan_on_paper(f"{MODEL} {changes}", world)


def get_times(changes: str, gpu: str = "H100", world: World = ONE) -> dict[str, float]:
    return {row.name: row.ms for row in predict_time(make(changes, world), find_processor(gpu)).rows}


def get_states(changes: str, gpu: str = "H100", world: World = ONE) -> dict[str, int]:
    return {row.name: row.num_bytes for row in list_states(make(changes, world), find_processor(gpu))}


@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_products_of_linear_layers_are_at_the_peak_of_fp8_and_no_others(gpu):
    wide, narrow = get_times("", gpu), get_times(HYBRID, gpu)
    processor = find_processor(gpu)
    ratio = processor.half_tflops / processor.fp8_tflops
    of_layers = wide["matrix products"] - narrow["matrix products"]
    assert narrow["products in fp8"] == pytest.approx(of_layers * ratio)
    parts = count_parameter_parts(make().shape)
    in_layers = parts["attention"] + parts["MLP"]
    assert of_layers / wide["matrix products"] == pytest.approx(in_layers / (in_layers + parts["word embedding"]))
    assert narrow["attention"] == wide["attention"] and narrow["loss"] == wide["loss"]


def test_gradients_of_weights_can_stay_in_16_bits_with_delayed_scales():
    whole, part = get_times(HYBRID)["products in fp8"], get_times(f"{HYBRID} --no-fp8-wgrad")["products in fp8"]
    assert part == pytest.approx(whole * 2 / 3)
    assert get_times(f"{TENSORWISE} --no-fp8-wgrad")["products in fp8"] == pytest.approx(whole)


def test_routers_stay_in_16_bits_and_experts_do_not():
    parts = count_parameter_parts(make(EXPERTS).shape)
    in_fp8 = parts["attention"] + parts["experts"] + parts["shared expert"]
    assert get_states(f"{EXPERTS} {HYBRID}")["copies of weights in fp8"] == 2 * in_fp8


@pytest.mark.parametrize(
    ("gpu", "flags"), [("A100", HYBRID), ("V100 SXM2 32 GB", HYBRID.replace("hybrid", "e4m3")), ("H100", MXFP8)]
)
def test_a_gpu_without_such_products_has_no_bound_and_one_line_that_says_so(gpu, flags):
    changes = flags.replace("--bf16", "--fp16")
    time = predict_time(make(changes), find_processor(gpu))
    assert time.peak_tflops == 0
    assert "products in fp8" not in [row.name for row in time.rows]
    assert len([note for note in time.notes if "fp8" in note]) == 1


@pytest.mark.parametrize(
    ("flags", "gpu", "each"),
    [(HYBRID, "H100", 2), (HYBRID, "B200", 1), (TENSORWISE, "B200", 1), (MXFP8, "B200", 2 * 33 / 32), (BLOCKWISE, "H100", 2 * 33 / 32)],
)  # fmt: skip
def test_weights_have_copies_in_fp8_as_often_as_the_gpu_needs_them(flags, gpu, each):
    parts = count_parameter_parts(make().shape)
    wide, narrow = get_states("", gpu), get_states(flags, gpu)
    assert narrow["copies of weights in fp8"] == int(each * (parts["attention"] + parts["MLP"]))
    assert narrow["weights"] == wide["weights"]


def test_weights_that_are_gathered_in_fp8_have_no_copy_in_16_bits():
    flags = f"{ZERO1} {HYBRID}"
    parts = count_parameter_parts(make().shape)
    in_layers = parts["attention"] + parts["MLP"]
    beside, instead = make(flags, TWO), make(f"{flags} --fp8-param-gather", TWO)
    rows = [{row.name: row.num_bytes for row in predict_memory(one).moments[0].rows} for one in (beside, instead)]
    assert rows[0]["gathered weights"] - rows[1]["gathered weights"] == 2 * in_layers
    assert rows[0]["copies of weights in fp8"] == rows[1]["weights in fp8"] == 2 * in_layers
    sent = [sum(one.num_bytes for one in list_exchanges(plan) if one.what == "weights") for plan in (beside, instead)]
    assert sent[0] - sent[1] == in_layers
    # torch's FSDP gathers 16 bits, as Megatron-LM has it
    sharded = make(f"{ZERO3} {HYBRID} --fp8-param-gather", TWO)
    assert not sharded.keeps_fp8_weights
    assert wording("planner/copies-of-weights-in") not in [row.name for row in list_states(sharded, None)]


def get_kept(changes: str, world: World = ONE) -> dict[str, int]:
    """Bytes of activations at the end of forward, by row."""
    rows = predict_memory(make(changes, world)).moments[0].rows
    return {row.name: row.num_bytes for row in rows if row.category == "activations"}


def test_inputs_of_linear_layers_are_kept_in_fp8():
    """Those of the projections of attention and of the MLP; of its second product; attention keeps its result itself."""
    shape = make().shape
    tokens = 4 * 2 * shape.seq_length  # of all layers
    wide, delayed, tensorwise = get_kept(""), get_kept(HYBRID), get_kept(TENSORWISE)
    inputs, mlp = "inputs of linear layers", "MLP's activation function"
    assert wide[mlp] - tensorwise[mlp] == wide[mlp] - delayed[mlp] == tokens * shape.ffn_hidden_size
    assert wide[inputs] - tensorwise[inputs] == 2 * tokens * shape.hidden_size
    assert delayed[inputs] - tensorwise[inputs] == tokens * shape.attention_width
    others = {*wide} - {inputs, mlp}
    assert all(wide[name] == delayed[name] == tensorwise[name] for name in others)
    assert get_kept(f"{HYBRID} --no-fp8-wgrad") == wide


def test_experts_keep_their_inputs_in_fp8():
    wide, narrow = get_kept(EXPERTS), get_kept(f"{EXPERTS} {TENSORWISE}")
    shape = make(EXPERTS).shape
    rows = 4 * 2 * shape.seq_length * 2  # of two experts of each token
    assert wide["inputs of experts"] - narrow["inputs of experts"] == rows * shape.hidden_size
    saved = wide["experts' activation function"] - narrow["experts' activation function"]
    assert saved == rows * shape.experts.ffn_hidden_size


def test_the_first_and_the_last_layers_can_stay_in_16_bits():
    flags = f"{TENSORWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    assert make(flags).fp8_layers == (1,)
    whole, part = get_times(TENSORWISE), get_times(flags)
    assert part["products in fp8"] == pytest.approx(whole["products in fp8"] / 4)
    assert get_states(flags)["copies of weights in fp8"] * 4 == get_states(TENSORWISE)["copies of weights in fp8"]
    assert plan_batch(make(flags)).fp8_share == 0.25


def test_what_linear_layers_gather_is_gathered_in_fp8():
    def count_bytes(changes: str) -> int:
        gathers = [one for one in list_exchanges(make(f"{SP} {changes}", TWO)) if one.kind == GATHER]
        return sum(one.num_bytes * one.times for one in gathers)

    shape = make(SP, TWO).rank_shape
    passes, layers = 16 // 2, 4
    # for each product of a layer: its input twice, and the gradient of what it gives
    saved = passes * layers * (2 + 2 + 2) * 2 * shape.seq_length * shape.hidden_size
    assert count_bytes("") - count_bytes(HYBRID) == saved


def test_a_search_and_each_change_stay_in_fp8():
    found = search(make(HYBRID, TWO), find_processor("H100"), 0.08)
    assert found.fitting and all(one.plan.fp8 is not None for one in found.fitting)
    assert all(one.time is not None and one.time.peak_tflops == 1979.0 for one in found.fitting)


MISTAKES = {
    "!--bf16": "--bf16",
    "--first-last-layers-bf16": "--fp8-recipe",
    "--fp8-param-gather": "--use-distributed-optimizer",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_what_megatron_refuses_is_refused_in_one_line(flags):
    words = MODEL.replace("--bf16", "") if flags.startswith("!") else f"{MODEL} {flags}"
    [mistake] = list_fp8_mistakes(*find_paper(f"{words} {HYBRID}"))
    assert MISTAKES[flags] in mistake
    with pytest.raises(ConfigError) as raised:
        planned_run(argv(f"{words} {HYBRID}"), 1)
    assert raised.value.lines == [mistake]


def find_paper(changes: str):
    one = plan_on_paper(changes, ONE)
    return one.fp8, one.args


def test_an_unknown_recipe_is_refused_and_flags_without_a_format_are_the_trainers():
    with pytest.raises(ConfigError) as raised:
        take_fp8([*HYBRID.split(), "--fp8-recipe", "custom"])
    assert len(raised.value.lines) == 1
    assert take_fp8(["--fp8-recipe", "mxfp8"]) == (None, ["--fp8-recipe", "mxfp8"])


def test_old_spellings_are_planned():
    found = planned_run(argv(f"{MODEL} --fp8-hybrid"), 1)
    assert found.plan.fp8 is not None and found.plan.fp8.fp8_format == "hybrid"
    assert "--fp8-format" not in found.flags


def test_the_command_says_what_it_assumes_and_that_no_walk_has_it(capfd):
    words = argv(f"{MODEL} {HYBRID}")
    assert main(["plan", "--gpu", "H100", *words]) in (None, 0)
    said = capfd.readouterr().out
    assert "products in fp8" in said and wording("planner/on-paper-only") in said
    assert main(["plan", "--exact", *words]) == 2
    assert "--exact" in capfd.readouterr().err
