"""--yaml-cfg: the same names in a file, below the command line."""

import pytest
from command_lines import argv, mistakes

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import flags_of


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seq-length: 64", {"seq_length": 64}),
        ("seq_length: 64", {"seq_length": 64}),
        ("--seq-length: 64", {"seq_length": 64}),
        (
            "model:\n  size:\n    num_layers: 3\n  hidden-size: 8\nlr: 1e-4",
            {"num_layers": 3, "hidden_size": 8, "lr": 1e-4},
        ),
        ("fp16: true", {"fp16": True}),
        ("fp16: false", {}),
        ("bf16: yes\nfp16: no", {"bf16": True}),
        ("add_bias_linear: false", {"add_bias_linear": False}),
        ("add-bias-linear: true", {}),
        ("disable-bias-linear: true", {"add_bias_linear": False}),
        ("disable_bias_linear: false", {}),
        ("no_position_embedding: true", {"add_position_embedding": False}),
        ("data_path: [0.3, a, 0.7, b]", {"data_path": ("0.3", "a", "0.7", "b")}),
        ("data_path: one", {"data_path": ("one",)}),
        ("profile_ranks:\n- 0\n- -1", {"profile_ranks": (0, -1)}),
        ("rampup_batch_size: [16, 16, 5859375]", {"rampup_batch_size": (16, 16, 5859375)}),
        ("split: 949,50,1", {"split": "949,50,1"}),
        ("lr: 0.001\nmin_lr: null\nkv-channels:", {"lr": 0.001}),
        ("use_rotary_position_embeddings: true", {"position_embedding_type": "rope"}),
        ("persistent-save-interval: 5", {"save_interval": 5}),
        ("sequence_parallel: false\nnum_experts: null\nspec:", {}),
        ("a: &shared\n  lr: 1\nb: *shared", {"lr": 1.0}),
    ],
)
def test_settings(file, text, expected):
    assert values(file(text)) == expected


def test_every_knob_can_stand_in_a_file(file):
    """Each, written by its field's name, gives what its flag gives."""
    for flag in flags_of(Args):
        if flag.is_switch:
            text, words = str(not flag.default).lower(), [flag.spelling]
        elif flag.choices:
            text, words = flag.choices[-1], [flag.spelling, flag.choices[-1]]
        else:
            text, words = "7", [flag.spelling, "7"]
        assert values(file(f"group:\n  {flag.field}: {text}")) == read_command_line(words).values, flag.field


def test_command_line_wins_wherever_it_stands(file):
    path = file("lr: 1\nmin_lr: 2\nprofile_ranks: [1, 2]")
    for line in (
        ["--lr", "3", "--yaml-cfg", path, "--profile-ranks", "0"],
        [f"--yaml-cfg={path}", "--profile-ranks", "0", "--lr=3"],
    ):
        assert read_command_line(line).values == {"lr": 3.0, "min_lr": 2.0, "profile_ranks": (0,)}


def test_of_two_files_the_last_wins(file):
    first, second = file("lr: 1\nseed: 1", "first"), file("lr: 2", "second")
    assert read_command_line(["--yaml-cfg", first, "--yaml-cfg", second]).values == {"lr": 2.0, "seed": 1}


def test_another_spelling_in_the_file_is_no_contradiction(file):
    assert values(file("seq_length: 64"), "--encoder-seq-length 32") == {"seq_length": 32}


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("", ["--yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag."]),
        ("- a\n- b", ["--yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag."]),
        ("just words", ["--yaml-cfg {path}: holds no NAME: VALUE lines; write some, or drop the flag."]),
        ("a: 1\nb: [1,\nc: 2", ["--yaml-cfg {path}: not YAML at line 3; mend the file."]),
        ("a: 2024-99-99", ["--yaml-cfg {path}: not YAML; mend the file."]),
        ("[" * 5000, ["--yaml-cfg {path}: not YAML; mend the file."]),
        ("a: !!python/object/apply:os.getcwd []", ["--yaml-cfg {path}: not YAML at line 1; mend the file."]),
        ("model:\n  num_layer: 3", ["{path}: --num-layer is not a flag; did you mean --num-layers?"]),
        (
            "1: 2\nzzz: 3",
            [
                "{path}: --1 is not a flag; did you mean --bf16 or --fp16?",
                "{path}: --zzz is not a flag; --help lists them all.",
            ],
        ),
        ("lr: fast", ["{path}: --lr fast: needs a number."]),
        ("lr: true", ["{path}: lr: true: is no switch; give its value, or null."]),
        ("fp16: 1", ["{path}: fp16: 1: is a switch; give true or false."]),
        ("lr: [1, 2]", ["{path}: --lr takes one value, got 2: '1 2'."]),
        ("save: ''", ["{path}: --save '': is no usable value; give one, or drop the flag."]),
        (
            "fp8_format: hybrid",
            [
                "{path}: --fp8-format is refused: there is no FP8 here; drop it and use --bf16 or --fp16.",
            ],
        ),
        ("yaml_cfg: other", ["--yaml-cfg stands in a file of settings; give all files on the command line."]),
        (
            "seq_length: 8\nencoder-seq-length: 9",
            ["{path}: --seq-length 8 and --encoder-seq-length 9 are one setting; keep one."],
        ),
        (
            "lr: x\nsede: 3\nfp16: true\nbf16: true",
            [
                "{path}: --lr x: needs a number.",
                "{path}: --sede is not a flag; did you mean --seed?",
                "--fp16 and --bf16 exclude each other; keep one.",
            ],
        ),
    ],
)
def test_mistakes_name_the_file(file, text, answers):
    path = file(text)
    said = [line for line in mistakes(["--yaml-cfg", path]) if "max-position" not in line]
    assert [line.removeprefix(f"{path}: ") for line in said] == [
        a.removeprefix("{path}: ").format(path=path) for a in answers
    ]
    assert all(path in line for line, answer in zip(said, answers) if "{path}" in answer)


def test_a_group_that_holds_itself_ends(file):
    assert values(file("a: &a\n  lr: 1\n  b: *a")) == {"lr": 1.0}


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
    assert mistakes(["--yaml-cfg", str(path)]) == [f"--yaml-cfg {path}: cannot be read ({reason}); check the path."]


def test_a_whole_run_from_a_file(file):
    words = argv()
    pairs = [
        (name, words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else "true")
        for i, name in enumerate(words)
        if name.startswith("--")
    ]
    path = file("\n".join(f"{name[2:].replace('-', '_')}: {value}" for name, value in pairs))
    assert read_command_line(["--yaml-cfg", path]).args == read_command_line(words).args
