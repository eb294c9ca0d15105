"""Files that hold the words of --data-path and its kin."""

import json

import pytest
from support.command_lines import mistakes
from support.wording import wording

from megatron_lite.config.args import DataArgs
from megatron_lite.config.data_paths import read_argument_files
from megatron_lite.errors import DataError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", ("a",)),
        (" 0.3 a\n0.7\tb\n\n", ("0.3", "a", "0.7", "b")),
        ("0.3\r\na", ("0.3", "a")),
        ("\ufeff0.3 a", ("0.3", "a")),
    ],
)
def test_words_are_what_white_space_separates(tmp_path, text, words):
    path = tmp_path / "words"
    path.write_text(text)
    read = read_argument_files(DataArgs(data_args_path=str(path)))
    assert read == DataArgs(data_args_path=str(path), data_path=words)


def test_words_of_each_split(tmp_path):
    path = tmp_path / "splits.json"
    path.write_text('{"train": [30, "a", 0.7, "b"], "test": ["c"], "valid": null}')
    read = read_argument_files(DataArgs(per_split_data_args_path=str(path)))
    assert (read.train_data_path, read.valid_data_path, read.test_data_path) == (("30", "a", "0.7", "b"), (), ("c",))
    assert read_argument_files(DataArgs(data_path=("x",))) == DataArgs(data_path=("x",))


EMPTY, UNNAMED = ": is empty; write what --data-path takes into it", "not JSON of the form "
WITHOUT_WORDS = {
    b"": EMPTY, b" \n": EMPTY, b"\xff": ": not UTF-8; give a text file",
    None: ": cannot be read (No such file or directory); check the path",
}  # fmt: skip
WITHOUT_SPLITS = {
    "a b": UNNAMED, "[" * 100_000: UNNAMED, '["a"]': UNNAMED, '{"train": ["a"], "validation": ["b"]}': UNNAMED,
    '{"train": "a"}': '"train" is not a list of strings; write what --train-data-path takes',
    '{"train": ["a"], "test": [["a"]]}': '"test" is not a list of strings; write what --test-data-path takes',
}  # fmt: skip


def test_files_without_words_or_splits(tmp_path):
    for number, (raw, message) in enumerate(WITHOUT_WORDS.items()):
        path = tmp_path / f"words{number}"
        if raw is not None:
            path.write_bytes(raw)
        with pytest.raises(DataError) as caught:
            read_argument_files(DataArgs(data_args_path=str(path)))
        assert str(caught.value) == f"--data-args-path {path}{message}"
    for text, message in WITHOUT_SPLITS.items():
        (tmp_path / "splits.json").write_text(text)
        with pytest.raises(DataError) as caught:
            read_argument_files(DataArgs(per_split_data_args_path=f"{tmp_path}/splits.json"))
        assert str(caught.value).startswith(f"--per-split-data-args-path {tmp_path}/splits.json: {message}")


def test_a_split_file_obeys_the_rules_of_the_flags(tmp_path):
    path, prefix = tmp_path / "splits.json", tmp_path / "a"
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").touch()
    path.write_text(json.dumps({"valid": [str(prefix)]}))
    words = f"!--mock-data --per-split-data-args-path {path}"
    assert mistakes(words) == [wording("config/names-no-data-for", "--per-split-data-args-path", path)]
    assert mistakes(f"{words} --skip-train") == []
    path.write_text(json.dumps({"train": [str(prefix)]}))
    assert mistakes(words) == []
    assert mistakes(f"{words} --split 9,1") == [
        wording("config/does-not-go-with", "--split", "9,1", "--per-split-data-args-path")
    ]
    for flag in ("--data-path", "--test-data-path"):
        told = f"{flag} and --per-split-data-args-path exclude each other; keep one."
        assert mistakes(f"{words} {flag} {path}")[0] == told
