"""Tokenizers that read --tokenizer-model: the ids of Megatron's own, and one line for each model that does not fit."""

import base64
import functools
import io
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from support.odd_texts import PROSE, texts
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.data import byte_pairs
from megatron_lite.data.byte_pairs import SPECIAL_TOKENS, train_bpe, write_bpe
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import UserError

ALL_BYTES = [bytes([i]) for i in range(256)]
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def megatrons(path, library: str, **options):
    tokenizers = pytest.importorskip("megatron.core.tokenizers")
    return tokenizers.MegatronTokenizer.from_pretrained(str(path), {"library": library}, **options)


def assert_same(mine, theirs, *more: str):
    assert (mine.vocab_size, mine.eod) == (theirs.vocab_size, theirs.eod)
    for text in texts(*more):
        assert mine.encode(text) == theirs.tokenize(text), text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def sentence_piece(path, **options):
    package = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    package.SentencePieceTrainer.train(sentence_iterator=iter(PROSE), model_writer=model, minloglevel=2, **options)
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def model_file(folder):
    return sentence_piece(folder / "bpe.model", vocab_size=340, model_type="bpe", byte_fallback=True)


@pytest.fixture(scope="module")
def json_file(folder):
    return tik(folder / "tik.json", [*ALL_BYTES, b"th", b"the", b" t", b" the", b"  ", "é".encode()])


def tik(path, tokens: list[bytes]) -> str:
    texts = [(base64.b64encode(token).decode(), token.decode("utf-8", "replace")) for token in tokens]
    path.write_text(json.dumps([{"rank": i, "token_bytes": b, "token_str": s} for i, (b, s) in enumerate(texts)]))
    return str(path)


@pytest.fixture(scope="module")
def hf_folder(folder):
    transformers = pytest.importorskip("transformers")
    write_bpe(folder, *train_bpe(PROSE, 300))
    path = folder / "hf"
    transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_sentence_piece_ids_are_megatrons(model_file, kind):
    mine = make_tokenizer(kind, tokenizer_model=model_file)
    assert_same(mine, megatrons(model_file, "sentencepiece", legacy=False, special_tokens=None), "☯ x  ☯")
    assert mine.eod == 2 and mine.decode([*mine.encode("the old cat"), mine.eod]) == "the old cat"


def test_a_model_without_end_of_sentence_has_no_end_of_document(folder, tmp_path, capsys):
    model = sentence_piece(tmp_path / "x.model", vocab_size=30, eos_id=-1)
    assert make_tokenizer("SentencePieceTokenizer", tokenizer_model=model).eod is None
    (tmp_path / "a.txt").write_text("the cat")
    argv = f"preprocess --input {tmp_path}/a.txt --output-prefix {tmp_path}/x --tokenizer-model {model}".split()
    argv += ["--tokenizer-type", "SentencePieceTokenizer"]
    assert main([*argv, "--append-eod"]) == 2
    assert capsys.readouterr().err.startswith(wording("data/error-this-tokenizer-has", "--append-eod"))
    assert main(argv) == 0


@pytest.mark.parametrize("pattern", ["v1", "v2"])
@pytest.mark.parametrize("names", [(), (*reversed(SPECIAL_TOKENS), "[INST]")], ids=["usual", "own"])
def test_tiktoken_ids_are_megatrons(json_file, pattern, names):
    options = {"vocab_size": 275, "tiktoken_pattern": pattern, "tiktoken_num_special_tokens": 15}
    mine = make_tokenizer("TikTokenizer", tokenizer_model=json_file, tokenizer_special_tokens=names, **options)
    special = {"num_special_tokens": 15, "special_tokens": list(names) or None}
    theirs = megatrons(json_file, "tiktoken", vocab_size=275, pattern=pattern, **special)
    assert_same(mine, theirs, "a [INST]b<SPECIAL_9>", *[" the" * 300])
    assert mine.decode(mine.encode("<s>thé the </s>")) == "<s>thé the </s>"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("names", [(), ("<new>", "<|endoftext|>", "<more>")], ids=["plain", "more"])
def test_hugging_face_ids_are_megatrons(hf_folder, include, names):
    ours = {"tokenizer_special_tokens": names, "tokenizer_hf_include_special_tokens": include}
    mine = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=hf_folder, **ours)
    options = {"include_special_tokens": include, "additional_special_tokens": list(names)}
    theirs = megatrons(hf_folder, "huggingface", use_fast=True, **options)
    assert_same(mine, theirs, "the<|endoftext|> cat<new> <more>")
    assert mine.decode(mine.encode("thé<|endoftext|> cat")) == "thé<|endoftext|> cat"


def test_hugging_face_keeps_what_stands_around_a_text_only_if_told_to(hf_folder, tmp_path):
    """A tokenizer that puts a token before each text, and would cut texts after 3 tokens and pad them to 3."""
    library, folder = pytest.importorskip("tokenizers"), Path(shutil.copytree(hf_folder, tmp_path / "x"))
    stored = library.Tokenizer.from_file(f"{hf_folder}/tokenizer.json")
    end = stored.token_to_id("<|endoftext|>")
    around_texts = {"single": "<|endoftext|> $A", "special_tokens": [("<|endoftext|>", end)]}
    stored.post_processor = library.processors.TemplateProcessing(**around_texts)
    stored.enable_truncation(3)
    stored.enable_padding(length=3)
    stored.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    make = functools.partial(make_tokenizer, "HuggingFaceTokenizer")
    plain = make(tokenizer_model=str(tmp_path / "x"))
    around = make(tokenizer_model=str(tmp_path / "x"), tokenizer_hf_include_special_tokens=True)
    whole = make(tokenizer_model=hf_folder)
    for text in ("the old cat sat on the mat, 77", "a"):
        assert plain.encode(text) == whole.encode(text) and around.encode(text) == [end, *whole.encode(text)]


def tokenizers(folder, model_file, json_file, hf_folder):
    files = {"vocab_file": f"{folder}/vocab.json", "merge_file": f"{folder}/merges.txt"}
    return [
        make_tokenizer("GPT2BPETokenizer", **files),
        make_tokenizer("Llama2Tokenizer", tokenizer_model=model_file),
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=hf_folder),
        make_tokenizer("TikTokenizer", tokenizer_model=json_file, vocab_size=270, tiktoken_num_special_tokens=9),
    ]


def test_pickled_ones_are_the_same_bytes_and_give_the_same_ids(folder, model_file, json_file, hf_folder):
    paths = (folder, model_file, json_file, hf_folder)
    for one, other in zip(tokenizers(*paths), tokenizers(*paths)):
        assert pickle.dumps(one) == pickle.dumps(other)
        copy = pickle.loads(pickle.dumps(one))
        assert [copy.encode(text) for text in texts()] == [one.encode(text) for text in texts()]
        assert one.encode("a\ud800b") == one.encode("a\ufffdb")  # half a surrogate pair is a replacement mark


def test_runs_of_white_space_that_tiktoken_dies_of(folder, hf_folder, json_file, monkeypatch):
    gpt2, _, hf, tiktoken = tokenizers(folder, sentence_piece(folder / "y.model", vocab_size=30), json_file, hf_folder)
    for text in ("x" + " " * 1_100_000 + "y", " \n" * 550_000 + "\t!"):
        assert gpt2.encode(text) == hf.encode(text)
        assert tiktoken.decode(tiktoken.encode(f"<s>{text}")) == f"<s>{text}"
    usual = texts("a\ud800b")
    expected = [(gpt2.encode(text), tiktoken.encode(text)) for text in usual]
    monkeypatch.setattr(byte_pairs, "_has_long_blank", lambda text: True)
    assert [(gpt2.encode(text), tiktoken.encode(text)) for text in usual] == expected


def test_a_long_run_is_seen_wherever_it_stands(monkeypatch):
    monkeypatch.setattr(byte_pairs, "BLANK_BLOCK", 10)
    for before in range(25):
        assert byte_pairs._has_long_blank("x" * before + " " * 20 + "y" * 7)
        assert not byte_pairs._has_long_blank("x" * before + " " * 9 + "y" * 30)


@pytest.mark.parametrize("kind", [*SENTENCE_PIECE, "HuggingFaceTokenizer", "TikTokenizer"])
def test_a_missing_package_or_model(monkeypatch, kind):
    with pytest.raises(UserError, match=rf"^--tokenizer-model: missing, {kind} needs it; give its file or folder$"):
        make_tokenizer(kind)
    if kind == "TikTokenizer":
        return
    module, extra = ("transformers", "hf") if kind == "HuggingFaceTokenizer" else ("sentencepiece", "sentencepiece")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as caught:
        make_tokenizer(kind, tokenizer_model="x")
    needs = f"needs the package {module}; pip install 'megatron_lite[{extra}]'"
    assert str(caught.value) == f"--tokenizer-type {kind}: {needs}"


def test_files_that_are_no_sentence_piece_model(tmp_path, model_file):
    whole = open(model_file, "rb").read()
    no_model = "not a SentencePiece model; give the .model file, or another --tokenizer-type"
    for name, content, message in (
        ("none", None, "cannot be read (No such file or directory); give the .model file"),
        ("", None, "cannot be read (Is a directory); give the .model file"),
        ("text", b"the cat", no_model),
        ("empty", b"", no_model),
        ("cut", whole[:1000], no_model),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            make_tokenizer("Llama2Tokenizer", tokenizer_model=str(tmp_path / name))
        assert str(caught.value) == f"--tokenizer-model {tmp_path / name}: {message}"


NO_TOKEN = "entry 0 is not that rank's token; give"
NO_BYTES = "does not start with the 256 bytes, or repeats a token; give"
NO_TIKTOKEN = {
    "none": (None, "cannot be read (No such file or directory); check the path"),
    "utf8": (b"\xff", "not JSON; give a list of "),
    "deep": (b"[" * 100_000, "not JSON; give a list of "),
    "dict": (b"{}", "a dict; give a list of "),
    "number": (b"[1]", NO_TOKEN),
    "rank": (b'[{"rank": 1, "token_bytes": "AA=="}]', NO_TOKEN),
    "base64": (b'[{"rank": 0, "token_bytes": "?"}]', NO_TOKEN),
    "no-text": (b'[{"rank": 0, "token_bytes": 7}]', NO_TOKEN),
    "empty": (b"[]", NO_BYTES),
    "byte": ([*ALL_BYTES[:97], b"A", *ALL_BYTES[98:]], NO_BYTES),
    "twice": ([*ALL_BYTES, b"th", b"th"], NO_BYTES),
}


def test_files_that_are_no_tiktoken_model(tmp_path):
    path = tmp_path / "x.json"
    for content, message in NO_TIKTOKEN.values():
        if isinstance(content, list):
            tik(path, content)
        elif content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            make_tokenizer("TikTokenizer", tokenizer_model=str(path), vocab_size=256 + 1000)
        assert str(caught.value).startswith(f"--tokenizer-model {path}: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "131072: FILE holds 262 tokens, with the special ones 1262; give --vocab-size 1262"),
        ({"vocab_size": 1263}, "1263: FILE holds 262 tokens, with the special ones 1262; give --vocab-size 1262"),
        ({"vocab_size": 1000}, "1000: must be at least the 7 named ones and less than the vocabulary of 1000;"),
        ({"tiktoken_num_special_tokens": 6}, "--tiktoken-num-special-tokens 6: must be at least the 7 named ones"),
        ({"tokenizer_special_tokens": ("<s>",)}, "--tokenizer-special-tokens <s>: <unk> is missing; name all of <unk>"),
        ({"tokenizer_special_tokens": (*SPECIAL_TOKENS, "<s>")}, "<sep> <s>: <s> is there twice; name each token once"),
        ({"tokenizer_special_tokens": (*SPECIAL_TOKENS, "<SPECIAL_8>")}, "<SPECIAL_8> is there twice"),
    ],
)
def test_numbers_that_do_not_fit_a_tiktoken_model(json_file, options, message):
    with pytest.raises(UserError) as caught:
        make_tokenizer("TikTokenizer", tokenizer_model=json_file, **options)
    assert message.replace("FILE", json_file) in str(caught.value)


CODE = {"config.json": "{}", "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "x.py": "1 / 0"}
NO_FOLDER = {
    "empty": ({}, "no tokenizer ("),
    "damaged": ({"tokenizer.json": "{"}, "no tokenizer (Expecting property name"),
    "code": (CODE, "no tokenizer (it needs code of its own, which is not run here)"),
}


@pytest.mark.parametrize("kind", NO_FOLDER)
def test_folders_without_a_tokenizer(tmp_path, kind):
    pytest.importorskip("transformers")
    files, why = NO_FOLDER[kind]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    said = str(caught.value)
    assert said.startswith(f"--tokenizer-model {tmp_path}: {why}") and "\n" not in said
    assert said.endswith(wording("data/give-folder-that-save"))


@pytest.mark.parametrize("way", ["offline", "unreachable"])
def test_a_name_without_a_network_is_told_at_once(monkeypatch, tmp_path, capsys, way):
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("transformers")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", way == "offline")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = (
        r"^--tokenizer-model no-one/no-model: no such folder, not in Hugging Face's cache, and its hub cannot be "
        r"reached; give a folder with tokenizer.json, or fetch it where there is a network$"
    )
    with pytest.raises(UserError, match=message):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model="no-one/no-model")
    assert capsys.readouterr().err == ""


def test_commands_take_the_same_flags(tmp_path, json_file, model_file, hf_folder, capsys):
    (tmp_path / "a.txt").write_text("the old cat")
    tik_flags = "--vocab-size 270 --tiktoken-num-special-tokens 9 --tiktoken-pattern v1"
    for kind, model, more, eod in (
        ("TikTokenizer", json_file, tik_flags, 2),
        ("Llama2Tokenizer", model_file, "", 2),
        ("HuggingFaceTokenizer", hf_folder, "", None),
    ):
        flags = ["--tokenizer-type", kind, "--tokenizer-model", model, *more.split()]
        argv = ["--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/x", "--append-eod", *flags]
        assert main(["preprocess", *argv]) == 0
        ids = IndexedDataset(f"{tmp_path}/x_text_document").tokens(0)
        assert eod in (None, ids[-1])
        capsys.readouterr()
        assert main(["inspect", f"{tmp_path}/x_text_document", *flags]) == 0
        shown = capsys.readouterr().out
        assert "the old cat" in shown and wording("data/of-documents-end-with", 1, 1, ids[-1]) in shown
