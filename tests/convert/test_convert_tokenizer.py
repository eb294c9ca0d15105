"""The tokenizer of an exported folder gives the ids that the model was trained on."""

import json
from pathlib import Path

import pytest
from support.convert_cases import EXACT, LLAMA, export, kept, skip_without_twin
from support.model_variants import PLAIN
from support.odd_texts import texts
from support.paths import GPT2

from megatron_lite.convert.tokenizer_files import describe_copied_tokenizer, describe_gpt2_tokenizer, training_flags
from megatron_lite.data.byte_pairs import train_bpe, write_bpe
from megatron_lite.data.text_files import END_OF_TEXT
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import UserError

transformers = pytest.importorskip("transformers", reason="equality with Hugging Face needs transformers")

ROWS = {"padded_vocab_size": 384}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    write_bpe(folder, *train_bpe([Path(__file__).read_text(encoding="utf-8")], 330))
    return folder


def files(folder: Path) -> tuple[str, str]:
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def exported(shape, tokenizer, target: Path) -> Path:
    export(kept(type(shape)(**vars(shape) | ROWS), vocab_size=None), target, tokenizer=tokenizer)
    return target


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3"])
def test_ids_are_those_of_training(name, bpe, tmp_path):
    skip_without_twin(transformers, name)
    exported(EXACT[name], describe_gpt2_tokenizer(*files(bpe)), tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    reader = transformers.GPT2Tokenizer if name == "qwen2" else transformers.AutoTokenizer
    theirs = reader.from_pretrained(tmp_path)
    ours = make_tokenizer("GPT2BPETokenizer", vocab_file=files(bpe)[0], merge_file=files(bpe)[1])
    assert len(theirs) == ours.vocab_size
    for text in [*texts(), Path(__file__).read_text(encoding="utf-8")]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs(END_OF_TEXT)["input_ids"] == [ours.eod] == [theirs.eos_token_id] == [theirs.bos_token_id]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == config.bos_token_id == ours.eod < config.vocab_size == ours.vocab_size
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == ours.eod
    assert theirs.model_max_length == PLAIN.max_position_embeddings


@pytest.mark.parametrize(("name", "warns"), [("qwen2", True), ("qwen3", False), ("llama", False), ("gpt2", False)])
def test_a_reader_that_cuts_text_otherwise_is_warned_of(name, warns, bpe, tmp_path):
    (tmp_path / "copied").mkdir()
    tokenizer = describe_gpt2_tokenizer(*files(bpe))
    tokenizer.write(tmp_path / "copied", 16)
    shape = type(PLAIN)(**vars(EXACT[name]) | ROWS)
    for number, given in enumerate((tokenizer, describe_copied_tokenizer(str(tmp_path / "copied")))):
        said = export(kept(shape, vocab_size=384), tmp_path / str(number), tokenizer=given)
        warning = (
            "  AutoTokenizer cuts text Qwen2's way for every such model; use GPT2Tokenizer.from_pretrained for this one"
        )
        assert said == [warning] * warns


@pytest.mark.skipif(not GPT2.is_dir(), reason="no ../shared/data/gpt2 beside the repository")
def test_gpt2s_own_files(tmp_path):
    tokenizer = describe_gpt2_tokenizer(*files(GPT2))
    assert tokenizer.vocab_size == 50257 and tokenizer.ids == {"bos_token_id": 50256, "eos_token_id": 50256}
    tokenizer.write(tmp_path, 1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = make_tokenizer("GPT2BPETokenizer", vocab_file=files(GPT2)[0], merge_file=files(GPT2)[1])
    text = (GPT2.parent / "tinyshakespeare.txt").read_text()[:50_000]
    for piece in [text, *texts()]:
        assert theirs(piece)["input_ids"] == ours.encode(piece)


def test_without_a_tokenizer_no_other_models_ids_are_claimed(tmp_path):
    for name in ("gpt2", "llama"):
        export(kept(EXACT[name]), tmp_path / name)
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert config.eos_token_id is None and config.bos_token_id is None


def test_a_folder_in_hugging_faces_form_is_copied(bpe, tmp_path):
    exported(PLAIN, describe_gpt2_tokenizer(*files(bpe)), tmp_path / "first")
    exported(LLAMA, describe_copied_tokenizer(str(tmp_path / "first")), tmp_path / "second")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second"))
    assert all(first[key] == second[key] for key in ("eos_token_id", "bos_token_id", "vocab_size"))


def test_ids_are_found_in_every_form_of_file(tmp_path):
    special = {"eos_token": {"content": "</s>", "special": True}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    added = {"added_tokens": [{"id": 9, "content": "</s>"}]}
    for model in ({"vocab": {"a": 0, "b": 1}}, {"vocab": [["a", -1.5], ["b", -2.0]]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, **added}))
        found = describe_copied_tokenizer(str(tmp_path))
        assert (found.vocab_size, found.ids) == (10, {"bos_token_id": None, "eos_token_id": 9})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"only sentencepiece knows")
    found = describe_copied_tokenizer(str(tmp_path))
    assert (found.vocab_size, found.ids) == (0, {"bos_token_id": None, "eos_token_id": None})


def test_what_is_no_tokenizer_is_refused(bpe, tmp_path):
    def refused(said: str):
        with pytest.raises(UserError) as caught:
            describe_copied_tokenizer(str(tmp_path))
        assert str(caught.value).startswith(f"--tokenizer-model {tmp_path}{said}")

    refused(": is no folder with one of tokenizer.json, ")
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    refused("/tokenizer.json: cannot be read as a JSON object; ")
    no_pairs, no_content = '{"model": {"vocab": [1]}}', '{"added_tokens": [{"id": 3}]}'
    for strange in ('{"model": []}', no_pairs, no_content, '{"model": {"vocab": {"a": "b"}}}'):
        path.write_text(strange)
        refused(": its tokenizer.json, vocab.json or tokenizer_config.json has not the form of a ")
    with pytest.raises(UserError, match="^--merge-file: missing"):
        describe_gpt2_tokenizer(files(bpe)[0], None)


def test_the_flags_of_training_name_a_tokenizer_that_reads_the_folder(bpe, tmp_path):
    assert training_flags(tmp_path) == []
    vocab, merges = files(bpe)
    gpt2 = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
    assert training_flags(bpe) == gpt2
    (tmp_path / "tokenizer.json").write_text("{}")
    general = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert training_flags(tmp_path) == general
    (tmp_path / "vocab.json").write_text('{"a": 0}')  # no byte-level BPE with an end of text, as Qwen's
    (tmp_path / "merges.txt").write_text("")
    assert training_flags(tmp_path) == general
