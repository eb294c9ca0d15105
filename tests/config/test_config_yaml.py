"""--yaml-cfg: the same names in a file, below the command line."""

import ast

import pytest
from support.command_lines import ALONE, GOOD, argv, mistakes, read_table
from support.wording import wording

from megatron_lite.config.args import Args
from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import ABSENT_BEGINS, list_flags
from megatron_lite.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "settings.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def values(path: str, more: str = "") -> dict:
    line = read_command_line(["--yaml-cfg", path, *more.split()])
    assert line.mistakes == []
    return line.values


SETTINGS = read_table("""
seq-length: 64 | {'seq_length': 64}
seq_length: 64 | {'seq_length': 64}
--seq-length: 64 | {'seq_length': 64}
model: /   size: /     num_layers: 3 /   hidden-size: 8 / lr: 1e-4 | {'num_layers': 3, 'hidden_size': 8, 'lr': 0.0001}
fp16: true | {'fp16': True}
fp16: false | {}
bf16: yes / fp16: no | {'bf16': True}
add_bias_linear: false | {'add_bias_linear': False}
add-bias-linear: true | {}
disable-bias-linear: true | {'add_bias_linear': False}
disable_bias_linear: false | {}
no_position_embedding: true | {'add_position_embedding': False}
data_path: [0.3, a, 0.7, b] | {'data_path': ('0.3', 'a', '0.7', 'b')}
data_path: one | {'data_path': ('one',)}
profile_ranks: / - 0 / - -1 | {'profile_ranks': (0, -1)}
rampup_batch_size: [16, 16, 5859375] | {'rampup_batch_size': (16, 16, 5859375)}
split: 949,50,1 | {'split': '949,50,1'}
lr: 0.001 / min_lr: null / kv-channels: | {'lr': 0.001}
use_rotary_position_embeddings: true | {'position_embedding_type': 'rope'}
persistent-save-interval: 5 | {'save_interval': 5}
sequence_parallel: false / num_experts: null / spec: | {}
a: &shared /   lr: 1 / b: *shared | {'lr': 1.0}
bias_gelu_fusion: false | {'bias_gelu_fusion': False}
load_optim: false / load_rng: true | {'no_load_optim': True}
layernorm_zero_centered_gamma: true / layernorm_epsilon: 1.e-6 | {'apply_layernorm_1p': True, 'norm_epsilon': 1e-06}
activation_func: swiglu / gated_linear_unit: false / swiglu: true | {'swiglu': True}
activation_func: silu / gated_linear_unit: true | {'swiglu': True}
swiglu: true / gated_linear_unit: true | {'swiglu': True}
model: /   activation_func: squaredrelu / swiglu: false | {'squared_relu': True}
activation_func: gelu | {'bias_gelu_fusion': False}
activation_func: null / gated_linear_unit: null | {}
zzz: false / yyy: null / use_legacy_models: false / wandb_project: '' | {'wandb_project': ''}
num_moe_experts: null / fp8: null / virtual_pipeline_model_parallel_size: null | {}
""")


@pytest.mark.parametrize(("text", "expected"), SETTINGS)
def test_settings(file, text, expected):
    assert values(file(text.replace(" / ", "\n"))) == ast.literal_eval(expected)


def test_every_knob_can_stand_in_a_file(file):
    """Each, written by its field's name, gives what its flag gives."""
    for flag in list_flags(Args):
        if flag.is_switch:
            text, words = str(not flag.default).lower(), [flag.spelling]
        elif flag.choices:
            text, words = flag.choices[-1], [flag.spelling, flag.choices[-1]]
        else:
            text, words = "7", [flag.spelling, "7"]
        assert values(file(f"group:\n  {flag.field}: {text}")) == read_command_line(words).values, flag.field


def test_of_two_places_the_later_wins(file):
    """The command line wherever it stands, the last of two files; another spelling is no contradiction."""
    path = file("lr: 1\nmin_lr: 2\nprofile_ranks: [1, 2]")
    for line in (f"--lr 3 --yaml-cfg {path} --profile-ranks 0", f"--yaml-cfg={path} --profile-ranks 0 --lr=3"):
        assert read_command_line(line.split()).values == {"lr": 3.0, "min_lr": 2.0, "profile_ranks": (0,)}
    first, second = file("lr: 1\nseed: 1", "first"), file("lr: 2", "second")
    assert read_command_line(["--yaml-cfg", first, "--yaml-cfg", second]).values == {"lr": 2.0, "seed": 1}
    assert values(file("seq_length: 64"), "--encoder-seq-length 32") == {"seq_length": 32}
    assert values(file("a: &a\n  lr: 1\n  b: *a")) == {"lr": 1.0}, "a group that holds itself ends"


MISTAKES = read_table(
    """
EMPTY | --yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag.
- a / - b | --yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag.
just words | --yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag.
a: 1 / b: [1, / c: 2 | --yaml-cfg {path}: not YAML at line 3; mend the file.
a: 2024-99-99 | --yaml-cfg {path}: not YAML; mend the file.
DEEP | --yaml-cfg {path}: not YAML; mend the file.
a: !!python/object/apply:os.getcwd [] | --yaml-cfg {path}: not YAML at line 1; mend the file.
model: /   num_layer: 3 | {path}: --num-layer is not a flag; did you mean --num-layers?
1: 2 / zzz: 3 | {path}: --1 is not a flag; --help lists them all. | {path}: --zzz is not a flag; --help lists them all.
lr: fast | {path}: --lr fast: needs a number.
lr: true | {path}: lr: true: is no switch; give its value, or null.
fp16: 1 | {path}: fp16: 1: is a switch; give true or false.
lr: [1, 2] | {path}: --lr takes one value, got 2: '1 2'.
save: '' | {path}: --save '': is no usable value; give one, or drop the flag.
fp8_format: hybrid | {path}: --fp8-format is refused: there is no FP8 here; drop it and use --bf16 or --fp16.
optimizer_cpu_offload: true | {path}: --optimizer-cpu-offload is refused: weights, moments and activations stay on the training device, masters and moments in fp32; drop it.
fp8: e4m3 | {path}: --fp8-format is refused: there is no FP8 here; drop it and use --bf16 or --fp16.
qk_clip_alpha: 0.5 | {path}: --qk-clip-alpha ABSENT: layers attend with a plain softmax and the same positions.
init_method: xavier_uniform | {path}: --init-method-xavier-uniform ABSENT: all matrices begin with the standard deviation of --init-method-std.
zzz: true | {path}: --zzz is not a flag; --help lists them all.
masked_softmax_fusion: 3 | {path}: masked_softmax_fusion: 3: is a switch; give true or false.
layernorm_zero_centered_gamma: 1 | {path}: layernorm_zero_centered_gamma: 1: is a switch; give true or false.
activation_func: geglu | {path}: activation_func: geglu: choose from swiglu, squaredrelu, gelu.
activation_func: silu | {path}: activation_func: silu: choose from swiglu, squaredrelu, gelu.
activation_func: [gelu] | {path}: activation_func: ['gelu']: choose from swiglu, squaredrelu, gelu.
activation_func: gelu / gated_linear_unit: true | {path}: gated_linear_unit: true: goes with activation_func: swiglu only, not gelu; give false.
gated_linear_unit: true | {path}: gated_linear_unit: true: needs activation_func: swiglu; add it, or give false.
activation_func: gelu / swiglu: true | {path}: swiglu: true: contradicts activation_func: gelu; keep one.
yaml_cfg: other | --yaml-cfg is in a settings file; give all files on the command line.
seq_length: 8 / encoder-seq-length: 9 | {path}: --seq-length 8 and --encoder-seq-length 9 are one setting; keep one.
lr: x / sede: 3 / fp16: true / bf16: true | {path}: --lr x: needs a number. | {path}: --sede is not a flag; did you mean --seed? | --fp16 and --bf16 exclude each other; keep one.
""",
    ABSENT=ABSENT_BEGINS,
    DEEP="[" * 5000,
)


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes_name_the_file(file, row):
    text, *answers = row
    path = file(text.replace("EMPTY", "").replace(" / ", "\n"))
    said = [line for line in mistakes(["--yaml-cfg", path]) if "max-position" not in line]
    expected = [answer.removeprefix("{path}: ").format(path=path) for answer in answers]
    assert [line.removeprefix(f"{path}: ") for line in said] == expected
    assert all(path in line for line, answer in zip(said, answers) if "{path}" in answer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00lr"), "not a text file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, make, reason):
    path = tmp_path / "settings.yaml"
    make(path)
    told = f"--yaml-cfg {path}: cannot be read ({reason}); check the path."
    assert mistakes(["--yaml-cfg", str(path)]) == [told]
    alone = read_command_line(["--yaml-cfg", str(path), "--sede", "1"])
    with pytest.raises(ConfigError) as caught:
        check(alone, ALONE)
    assert caught.value.lines == [
        told,
        wording("config/is-not-flag-did", "--sede", "--seed"),
    ]  # and nothing is called missing


SWITCHED_OFF = {
    **{key: f"--no-{key.replace('_', '-')}" for key in ["bias_swiglu_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion", "manual_gc_eval", "persist_layer_norm", "fp8_wgrad", "async_tensor_model_parallel_allreduce", "clone_scatter_output_in_embedding", "scatter_gather_tensors_in_pipeline", "mmap_bin_files"]},
    "apply_rope_fusion": "--no-rope-fusion", "tp_comm_split_ag": "--no-tp-comm-split-ag",
    "perform_initialization": "--no-initialization", "bert_binary_head": "--bert-no-binary-head",
    "overlap_p2p_comm": "--no-overlap-p2p-communication", "barrier_with_L1_time":
    "--no-barrier-with-level-1-timing", "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
}  # fmt: skip


def test_what_a_flag_switches_off_is_a_switch_in_a_file(file):
    for key, flag in SWITCHED_OFF.items():
        line = read_command_line(["--yaml-cfg", file(f"{key}: True")])
        assert (line.mistakes, line.notes, line.values) == ([], [], {})
        line = read_command_line(["--yaml-cfg", file(f"{key}: False")])
        assert line.mistakes == [] and len(line.notes) == 1 and line.notes[0].startswith(f"{flag} "), line.notes


# In the form of the files that Megatron-LM brings along: fields of its configuration classes beside flags' names.
IN_MEGATRONS_FORM = """
language_model:
  size: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, num_query_groups: null, window_size: null, init_method: null}
  layernorm_epsilon: 1.e-5
  layernorm_zero_centered_gamma: True
  add_bias_linear: False
  bias_activation_fusion: False
  gated_linear_unit: False
  activation_func: swiglu
  persist_layer_norm: False
  fp8_margin: 0
  fp8_wgrad: True
  moe_token_dropping: False
model_parallel:
  sequence_parallel: True
  perform_initialization: True
  params_dtype: null
  tp_comm_split_ag: True
  tp_comm_atomic_ag: True
  pipeline_dtype: null
  enable_autocast: False
  batch_p2p_comm: True
  cpu_offloading_num_layers: 0
  _cpu_offloading_context: null
  cpu_offloading_activations: True
add_position_embedding: False
position_embedding_type: rope
bert_binary_head: True
vocab_extra_ids: 0
sample_rate: 1.0
delay_grad_reduce: True
adlr_autoresume_interval: 1000
wandb_project: ''
enable_one_logger: True
one_logger_project: some
swiglu: True
"""


def test_a_file_in_megatrons_form(file):
    path = file(IN_MEGATRONS_FORM)
    assert mistakes(["--yaml-cfg", path]) == []
    assert values(path) == {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "norm_epsilon": 1e-5, "apply_layernorm_1p": True,
        "add_bias_linear": False, "add_position_embedding": False, "swiglu": True, "position_embedding_type": "rope",
        "sequence_parallel": True, "wandb_project": "",
    }  # fmt: skip


def test_a_whole_run_from_a_file(file):
    path = file("\n".join(f"{name[2:].replace('-', '_')}: {value or 'true'}" for name, value in GOOD.items()))
    assert read_command_line(["--yaml-cfg", path]).args == read_command_line(argv()).args
