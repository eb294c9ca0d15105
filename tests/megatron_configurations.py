"""Makes tests/config/megatron_functional.txt from a checkout of Megatron-LM: `python tests/megatron_configurations.py CHECKOUT`.

The facts are those of its functional tests of GPT and MoE pretraining: names, ranks and flags. Tests of inference and of reinforcement
learning start other programs and are left out. A configuration is written as what differs from the one most like it.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from support.megatron_functional import FILE, NEW, Configuration, write_words

FOLDERS = ("gpt", "moe", "mixtral")
OTHER_MODES = ("inference", "rl")
HEAD = """\
# Megatron-LM's own functional tests of pretraining: names, ranks, modes and flags, made from its checkout by tests/megatron_configurations.py.
# NAME | RANKS | MODE | LIKE | CHANGES. The flags are those of LIKE, without the ones that are named with ! before them, and with the others.
"""


def read_ranks(checkout: Path) -> dict[str, int]:
    """The number of ranks of each test case, as the recipes of H100 machines give it, else those of other machines."""
    ranks: dict[str, int] = {}
    recipes = checkout / "tests" / "test_utils" / "recipes"
    for path in [*sorted(recipes.glob("h100/*.yaml")), *sorted(recipes.glob("*/*.yaml"))]:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        spec = recipe.get("spec", {})
        for product in recipe.get("products") or ():
            sizes = {"gpus": 8, "nodes": 1} | spec
            for settings in product.get("products") or ():
                sizes |= {name: one[0] if isinstance(one, list) else one for name, one in settings.items()}
            for name in product.get("test_case") or ():
                ranks.setdefault(f"{spec.get('model')}/{name}", int(sizes["gpus"]) * int(sizes["nodes"]))
    return ranks


def read_flags(settings: dict[str, object]) -> dict[str, list[str]]:
    """{flag: values} of a MODEL_ARGS, as Megatron's script starts the trainer with them: true stands for a switch, a value with
    spaces is one word, and only brackets hold several."""
    flags: dict[str, list[str]] = {}
    for name, value in settings.items():
        if value is True:
            flags[name] = []
            continue
        text = re.sub(r"\$\{?REPEAT\}?", "1", str(value).strip())
        text = re.sub(r"\$\{(\w+)\}", r"/\1", text)
        is_list = text.startswith("[") and text.endswith("]")
        flags[name] = text[1:-1].split() if is_list else [text]
    return flags


def count_ranks(flags: dict[str, list[str]]) -> int:
    """A node, or the ranks of one replica where those are more: each stage divides into those that split a sequence's
    layers, and into those that have all experts."""
    sizes = {
        kind: int(next((flags[flag][0] for flag in _spell_size(kind) if flag in flags), "1"))
        for kind in ("tensor", "pipeline", "context", "expert")
    }
    expert_tensor = int(flags.get("--expert-tensor-parallel-size", [str(sizes["tensor"])])[0])
    of_experts = sizes["expert"] * expert_tensor if "--num-experts" in flags else 1
    return max(8, sizes["pipeline"] * math.lcm(sizes["tensor"] * sizes["context"], of_experts))


def _spell_size(kind: str) -> tuple[str, str]:
    return f"--{kind}-model-parallel-size", f"--{kind}-parallel-size"


def read_configurations(checkout: Path) -> Iterator[Configuration]:
    """All configurations of pretraining."""
    ranks = read_ranks(checkout)
    cases = checkout / "tests" / "functional_tests" / "test_cases"
    for path in sorted(path for folder in FOLDERS for path in cases.glob(f"{folder}/*/model_config.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        mode = str(config.get("MODE") or config.get("TEST_TYPE"))
        if mode in OTHER_MODES or "inference" in path.parent.name:
            continue
        case = f"{path.parent.parent.name}/{path.parent.name}"
        own_ranks = config.get("MODEL_ENV_VARS") or {}
        for key in (key for key in config if key.startswith("MODEL_ARGS")):
            name = case if key == "MODEL_ARGS" else f"{case}#{key}"
            flags = read_flags(config[key])
            number = own_ranks.get(key, {}).get("GPUS_PER_NODE") or ranks.get(case) or count_ranks(flags)
            yield Configuration(name, int(number), mode, flags)


def find_changes(one: Configuration, other: Configuration | None) -> list[str]:
    """The words that make the flags of `one` from those of `other`."""
    before = {} if other is None else other.flags
    gone = [f"!{name}" for name in before if name not in one.flags]
    changed = {name: values for name, values in one.flags.items() if before.get(name) != values}
    return gone + [shlex.quote(word) for word in write_words(changed)]


def write(configurations: list[Configuration]) -> str:
    """The file's text."""
    lines = [HEAD]
    for number, one in enumerate(configurations):
        likes = [None, *configurations[:number]]
        like = min(likes, key=lambda other: len(" ".join(find_changes(one, other))))
        words = " ".join(find_changes(one, like))
        lines.append(f"{one.name} | {one.ranks} | {one.mode} | {like.name if like else NEW} | {words}\n")
    return "".join(lines)


def main() -> None:
    """Make the file. A folder without functional tests ends it, and leaves the file as it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of Megatron-LM")
    configurations = list(read_configurations(parser.parse_args().checkout))
    if not configurations:
        sys.exit("no functional tests there; name a checkout of Megatron-LM")
    FILE.write_text(write(configurations), encoding="utf-8")


if __name__ == "__main__":
    main()
