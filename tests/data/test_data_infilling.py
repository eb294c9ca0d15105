"""--fim-data gives the samples of Megatron-LM's GPTFIMDataset, one for one."""

import json
import re

import numpy as np
import pytest
from support.infilling_cases import (
    CASES,
    NUM_SAMPLES,
    SAMPLES,
    SEED,
    SEQ_LENGTH,
    TOKENS,
    write_corpus,
    write_hugging_face,
)
from support.launch import BASE

from megatron_lite.config.args import DataArgs
from megatron_lite.config.check import RULES_WITHOUT_FILES, check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.world import World
from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.errors import ConfigError, DataError

EXPECTED = json.loads(SAMPLES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def hugging_face(corpus) -> str:
    return write_hugging_face(corpus.rpartition("/")[0])


def data_args(corpus: str, **settings) -> DataArgs:
    folder = corpus.rpartition("/")[0]
    files = {"vocab_file": f"{folder}/vocab.json", "merge_file": f"{folder}/merges.txt"}
    return DataArgs(data_path=(corpus,), split="1,0,0", **{**files, **settings})


def read_samples(d: DataArgs, number: int = NUM_SAMPLES) -> list[list[int]]:
    size = build_tokenizer(d).vocab_size
    dataset = build_datasets(DataSpec(d, (number, 0, 0), SEQ_LENGTH, SEED, size)).train
    return [dataset[i].tolist() for i in range(number)]


@pytest.mark.parametrize("name", CASES)
def test_samples_are_megatrons(name, corpus, hugging_face):
    fim = {f"fim_{key}": value for key, value in CASES[name].items()}
    d = data_args(corpus, fim_data=True, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hugging_face, **fim)
    assert read_samples(d) == EXPECTED[name]
    assert EXPECTED[name] != read_samples(data_args(corpus))


def test_texts_are_the_same_in_another_order(corpus):
    """Without an end of document within, and where it is long enough, a sample holds its own text once."""
    fim = {"fim_rate": 1.0, "fim_spm_rate": 0.5}
    plain, changed = read_samples(data_args(corpus)), read_samples(data_args(corpus, fim_data=True, **fim))
    tokenizer = build_tokenizer(data_args(corpus))
    ids = {name: tokenizer.find_token(token) for name, token in TOKENS.items()}
    forms = set()
    for before, after in zip(plain, changed):
        assert len(after) == SEQ_LENGTH + 1 and ids["prefix"] in after
        forms.add(after[after.index(ids["prefix"]) + 1] == ids["suffix"])
    assert forms == {True, False}
    assert len(changed) == NUM_SAMPLES and all(after != before for before, after in zip(plain, changed))


def test_an_unknown_token_is_the_unknown_one_or_refused(corpus, logged):
    samples = read_samples(data_args(corpus, fim_data=True, fim_rate=1.0, fim_middle_token="<nothing>"))
    eod = build_tokenizer(data_args(corpus)).eod
    assert re.search(rf"--fim-middle-token <nothing>: the vocabulary lacks it; its unknown token, {eod},", logged.text)
    assert sum(np.array(samples).flatten() == eod) > 30
    with pytest.raises(DataError, match="--fim-prefix-token <fim_prefix>: is no token of the vocabulary"):
        bytes_only = data_args(corpus, fim_data=True, tokenizer_type="ByteTokenizer")
        build_datasets(DataSpec(bytes_only, (1, 0, 0), SEQ_LENGTH, SEED, 512))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fim-data --mock-data", "--fim-data and --mock-data exclude each other"),
        ("--fim-data --data-path x", "--tokenizer-type NullTokenizer knows none"),
        ("--fim-data --data-path x --tokenizer-type ByteTokenizer --fim-split-sample y", "needs --fim-fragment-rate"),
        ("--fim-data --data-path x --tokenizer-type ByteTokenizer --fim-rate 0", "--fim-rate 0: must be above 0"),
    ],
)
def test_what_does_not_go_together_is_one_line(words, said):
    with pytest.raises(ConfigError) as caught:
        check(read_command_line([*BASE, *words.split()]), World(), RULES_WITHOUT_FILES)
    assert any(said in line for line in caught.value.lines)
