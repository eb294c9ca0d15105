import subprocess
import sys
from contextlib import nullcontext

import pytest
from support.paths import REPO
from support.wording import wording

from megatron_lite.__main__ import main as run_package
from megatron_lite.cli import main as cli
from megatron_lite.cli.main import COMMANDS, main


def test_no_command_lists_all_of_them(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    for words, said in {
        "make-corpos": "make-corpos: no such command; did you mean make-corpus?",
        "zzz": "zzz: no such command; there are train, generate, preprocess, merge, inspect, convert, make-corpus",
        "make-corpus": "megatron-lite make-corpus: the following arguments are required: --output-prefix",
        "make-corpus --output-prefix x --bpe many": "argument --bpe: invalid int value: 'many'",
        "make-corpus --output-pre x": "required: --output-prefix",
        "preprocess --input x --output-prefix y --parts 4": "unrecognized arguments: --parts 4",
    }.items():
        assert main(words.split()) == 2
        output = capsys.readouterr()
        assert output.out == "" and said in output.err
        assert output.err.startswith("error: ") and output.err.count("\n") == 1


def test_interrupting_is_no_traceback(monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert main(["preprocess"]) == 130


def test_commands_answer_without_importing_torch(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    code = f"""
import sys
from megatron_lite.cli.main import main
codes = [
    main(["preprocess", "--input", r"{tmp_path}/a.txt", "--output-prefix", r"{tmp_path}/a",
          "--tokenizer-type", "ByteTokenizer"]),
    main(["make-corpus", "--output-prefix", r"{tmp_path}/corpus/python", "--bpe", "300", "--max-mb", "0.1"]),
]
assert codes == [0, 0], codes
assert "tiktoken" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_the_module_is_the_command():
    words = [sys.executable, "-m", "megatron_lite.cli.main", "preproces"]
    run = subprocess.run(words, check=False, cwd=REPO, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.endswith(wording("cli/did-you-mean-preprocess"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_package_takes_commands_besides_flags(command, capsys):
    """`python -m megatron_lite report` is `megatron-lite report`."""
    with pytest.raises(SystemExit) if command != "train" else nullcontext():
        assert run_package([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert ("pretrain_gpt.py" if command == "train" else f"megatron-lite {command}") in shown.partition("\n")[0]
