"""Takes out of texts what may name people, machines, projects or data, and puts the same name in its place everywhere.

A text stays only as far as it is known: by its words (known_words.py), its form, or the place that it stands in.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import PurePosixPath

from megatron_lite.analysis.time.host_names import name_cause
from megatron_lite.bundle.known_words import MANGLED, RUN, is_known, is_known_in_symbol, is_plain
from megatron_lite.phase_names import find_meaning, find_step_family
from megatron_lite.postmortem.rank_ends import LOOPBACK


class Secret(Enum):
    """What was taken out; the values are the names that stand in its place, with a number behind."""

    HOST = "host"
    USER = "user"
    PATH = "path"
    WORD = "word"
    LABEL = "label"
    TEXT = "text"
    ADDRESS = "address"
    EMAIL = "email"
    URL = "url"
    ID = "id"


# words have a letter, so that names end as they did; labels that differ in a number alone are taken for one phase
WITH_LETTERS = (Secret.WORD, Secret.LABEL)
MEANINGS = {
    Secret.HOST: "names of machines",
    Secret.USER: "names of users",
    Secret.PATH: "folders",
    Secret.WORD: "unknown words in names of operators, kernels, functions, files and flags",
    Secret.LABEL: "labels of ranges that are not of a known form",
    Secret.TEXT: "texts",
    Secret.ADDRESS: "network addresses",
    Secret.EMAIL: "e-mail addresses",
    Secret.URL: "links",
    Secret.ID: "long numbers and ids",
}

MAX_LETTERS_OF_NAME = 2000  # the longest names of kernels have 1,500
MAX_LABEL_LETTERS = 120
MAX_LABEL_WORDS = 6
# of a label that a report takes for a phase
MAX_WORDS_OF_MEANING = 12
# of what is looked for in texts, as it is the name of a user or a machine
MIN_SECRET_LETTERS = 3

# "user@machine", the beginning of "git@machine:group/project.git", too
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_REMOTE = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w.-]+:[^\s\"'<>,;]+")
_URL = re.compile(r"\b\w+://[^\s\"'<>]+")
_IPV4 = re.compile(r"(?<![A-Za-z0-9.])\d{1,3}(?:\.\d{1,3}){3}(?![A-Za-z0-9]|\.\d)")
# in names of machines: ip-10-11-12-13
_DASHED_IPV4 = re.compile(r"(?<![A-Za-z0-9])(?:ip-\d{1,3}|10|127|172|192)(?:-\d{1,3}){3}(?![A-Za-z0-9])")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9a-fA-F:]*\d)(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])")
# "fe80::1": with so few colons only what begins as addresses do
_SHORT_IPV6 = re.compile(
    r"(?<![\w:.])(?:fe[89ab][0-9a-f]|f[cd][0-9a-f]{2}|[23][0-9a-f]{3})::(?:[0-9a-f]{1,4})?(?![\w:])", re.IGNORECASE
)
_MAC = re.compile(r"(?<![\w:-])[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}(?![\w:-])")
# of machines: modules have no "-" in their names, and such endings seldom
_DOMAIN = re.compile(
    r"(?<![\w.-])(?:"
    r"(?:[A-Za-z0-9][\w-]*\.)+(?:com|org|edu|gov|mil|intranet|lan|corp|localdomain)"
    r"|(?:[A-Za-z0-9][\w-]*\.){2,}(?:local|internal|cluster|cloud)"
    r"|(?=[\w.]*-)(?:[A-Za-z0-9][\w-]*\.)+(?:local|internal|cluster|cloud|home|net|io|ai|dev|ac|at|au|be|br|ca|ch|cn"
    r"|cz|de|dk|es|eu|fi|fr|ie|il|in|it|jp|kr|nl|no|nz|pl|ru|se|sg|tw|uk|us)"
    r")(?![\w-]|\.\w)"
)
# telephones, accounts: ten digits and more in three groups and more
_GROUPED_NUMBER = re.compile(
    r"(?<![\w.])\+?\(?(?=\d(?:[ ./()-]{0,2}\d){9})\d+(?:[ ./()-]{1,2}\d+){2,}(?!\w)"
    r"|(?<![\w.])\+(?=\d(?:[ -]?\d){7})\d{1,3}(?:[ -]\d+)+(?!\w)"
    r"|(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"
)
_PATH = re.compile(
    r"(?<![\w./\\<>-])(?:~[\w.-]*|[A-Za-z]:|\.{1,2})?[/\\]{1,2}(?:[^\s/\\:;,()'\"<>|]+[/\\])+[^\s/\\:;,()'\"<>|]*"
)
# "train.py(12): step" of the profiler, "step (train.py:12)" of this package
_FRAME = re.compile(r"(?P<path>[^()<>]*\.pyx?)(?P<line>\(\d+\): )(?P<function>.*)", re.DOTALL)
_OWN_FRAME = re.compile(r"(?P<function>[^()]*) \((?P<path>[^()]*?)(?P<line>:\d+)?\)")
# by which a key or a password is named
KEY_WORDS = r"key|token|secret|passw(?:or)?d|passphrase|credential|auth"
# "--hf-token", "WANDB_API_KEY", "--credentials", "ACCESS_KEY_ID", but not "--tokens"
_NAME_OF_KEY = re.compile(rf"(?:{KEY_WORDS}|keys|secrets|passwords|credentials)(?:[-_]?(?:id|\d+))*$", re.IGNORECASE)
# "--wandb-project", "--wandb-exp-name", "--master-addr", "HOSTNAME"
_NAME_OF_OWNER = re.compile(
    r"(?:project|entity|experiment|user|account|team|organization|owner|bucket|host|addr|address|endpoint|server)$"
    r"|(?:^|[-_]|user|host)name$",
    re.IGNORECASE,
)
# words of a prompt or a name, as no value of a flag has them
_SENTENCE = re.compile(r"[A-Za-z]\s+[A-Za-z]")
_UNPRINTABLE = re.compile(r"[^ -~]+")
_SLASHES = re.compile(r"[/\\]+")
_SCRIPTS = (".py", ".sh")
_INSTALLED = ("site-packages", "dist-packages")
_OWN_LIBRARY = re.compile(r"python3(?:\.\d+)?")
# of packages, and of folders with anything: only at the beginning of a path that torch has shortened
_PLAIN_PACKAGES = ("datasets", "nvidia", "ray", "streaming")
# packages of others: files of theirs tell what a frame does, wherever they lie
PACKAGES = frozenset(
    {
        "accelerate",
        "apex",
        "cupy",
        "datasets",
        "deep_gemm",
        "deepspeed",
        "diffusers",
        "fairscale",
        "fairseq",
        "flash_attn",
        "flashinfer",
        "fsdp",
        "functorch",
        "jax",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "litdata",
        "lmdeploy",
        "megatron",
        "megatron_fsdp",
        "megatron_lite",
        "mlflow",
        "multiprocessing",
        "numba",
        "numpy",
        "nvidia",
        "peft",
        "pytorch_lightning",
        "ray",
        "sglang",
        "streaming",
        "tensorboard",
        "tensorflow",
        "text_generation_server",
        "timm",
        "tokenizers",
        "torch",
        "torch_geometric",
        "torch_npu",
        "torchao",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "torchrec",
        "torchtitan",
        "torchvision",
        "tqdm",
        "transformer_engine",
        "transformers",
        "triton",
        "trl",
        "vllm",
        "wandb",
        "webdataset",
        "xformers",
    }
)


@dataclass
class Substitutes:
    """The names that stand in the place of others, and how many there are of each kind, by where they stood."""

    where: str = ""
    # kind and where -> distinct texts
    taken: dict[tuple[Secret, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    # what was left out as a whole, by what and where -> how many
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    _numbers: dict[Secret, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _hidden: dict[str, Secret] = field(default_factory=dict)
    _secrets: re.Pattern[str] | None = None
    _cache: dict[tuple[str, str], str] = field(default_factory=dict)

    def enter(self, where: str) -> None:
        """Begin with another file, which `where` names."""
        self.where = where
        self._cache.clear()

    def drop(self, what: str, number: int = 1) -> None:
        """Count what is left out as a whole."""
        if number:
            self.dropped[what, self.where] += number

    def hide(self, kind: Secret, text: str | None) -> None:
        """From now on, replace this text wherever it stands: a machine's or a user's name."""
        key = _shorten_host(text or "") if kind is Secret.HOST else text or ""
        is_word = key.isdigit() or (key.isalpha() and is_known(key))
        if len(key) < MIN_SECRET_LETTERS or key == LOOPBACK or is_word or key.lower() in self._hidden:
            return
        self._hidden[key.lower()] = kind
        longest_first = sorted(self._hidden, key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest_first))
        self._secrets = re.compile(rf"(?<![A-Za-z0-9])({any_of})(?![A-Za-z0-9])(\.[A-Za-z][\w.-]*)?", re.IGNORECASE)
        self._cache.clear()

    def _replace_hidden(self, found: re.Match[str]) -> str:
        key = found[1].lower()
        kind = self._hidden[key]
        # a machine's domain goes with it
        behind = "" if kind is Secret.HOST else found[2] or ""
        return self.replace(kind, key) + behind

    # --- the same name for the same text

    def replace(self, kind: Secret, text: str) -> str:
        """The name that stands for a text: host-2, wordC."""
        numbers = self._numbers[kind]
        number = numbers.setdefault(text, len(numbers) + 1)
        self.taken[kind, self.where].add(text)
        return f"{kind.value}{_to_letters(number)}" if kind in WITH_LETTERS else f"{kind.value}-{number}"

    def _cached(self, rule: str, text: str, clean: Callable[[str], str]) -> str:
        key = (rule, text)
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = clean(text)
        return known

    def clean_host(self, text: str) -> str:
        """A machine's name, with or without its domain."""
        if text in ("", LOOPBACK):
            return text
        return self.replace(Secret.HOST, _shorten_host(text))

    def clean_text(self, text: str) -> str:
        """A text that nobody knows."""
        return self.replace(Secret.TEXT, text) if text else ""

    # --- names of operators, kernels, functions

    def clean_name(self, text: str) -> str:
        """A name, of which known words stay."""
        return self._cached("name", text, self._clean_name)

    def _clean_name(self, text: str) -> str:
        if len(text) > MAX_LETTERS_OF_NAME:
            end = self.replace(Secret.WORD, text[MAX_LETTERS_OF_NAME:])
            text = f"{text[:MAX_LETTERS_OF_NAME]}.{end}"
        frame = _FRAME.fullmatch(text)
        if frame:
            return f"{self.clean_path(frame['path'])}{frame['line']}{self._clean_words(frame['function'])}"
        return self._clean_words(text)

    def _clean_words(self, text: str, is_kept: Callable[[str], bool] | None = None) -> str:
        """A text of which known words stay. is_kept: which letters and digits do."""
        if self._secrets:
            text = self._secrets.sub(self._replace_hidden, text)
        for kind, pattern in _FORMS:
            text = pattern.sub(partial(self._replace_found, kind), text)
        text = _PATH.sub(lambda found: self._clean_path(found[0]), text)
        if is_kept is None:
            is_kept = is_known_in_symbol if MANGLED.match(text) else is_known
        text = RUN.sub(partial(self._clean_run, is_kept), text)
        # another word for each, so that names that differ stay apart
        return _UNPRINTABLE.sub(partial(self._replace_found, Secret.WORD), text)

    def _replace_found(self, kind: Secret, found: re.Match[str]) -> str:
        return self.replace(kind, found[0])

    def _clean_run(self, is_kept: Callable[[str], bool], found: re.Match[str]) -> str:
        run = found[0]
        if is_kept(run):
            return run
        return self.replace(Secret.ID if run.isdigit() else Secret.WORD, run)

    # --- labels that a program gives its ranges

    def clean_label(self, text: str) -> str:
        """A label, which stays if it is short and all its words are known, and in part if a report reads it."""
        return self._cached("label", text, self._clean_label)

    def _clean_label(self, text: str) -> str:
        if self._is_known_label(text):
            return text
        if _means_something(text):
            return self._clean_words(text)
        return self.replace(Secret.LABEL, text)

    def _is_known_label(self, text: str) -> bool:
        if len(text) > MAX_LABEL_LETTERS or not text.isascii() or not text.isprintable():
            return False
        runs = RUN.findall(text)
        has_form = any(pattern.search(text) for _, pattern in _FORMS) or _PATH.search(text)
        if has_form or (self._secrets and self._secrets.search(text)):
            return False
        words = [run for run in runs if not run.isdigit()]
        return len(words) <= MAX_LABEL_WORDS and all(map(is_plain, runs))

    # --- files

    def clean_path(self, text: str) -> str:
        """A file's path: what lies in installed packages stays, elsewhere a number stands for the folder."""
        return self._cached("path", text, self._clean_path)

    def _clean_path(self, text: str) -> str:
        parts = [part for part in _SLASHES.split(text) if part]
        if not parts or text.startswith("<"):
            return self._clean_words(text)
        is_absolute = text.startswith(("/", "~", "\\")) or text[1:2] == ":"
        start = _find_package(parts, is_absolute)
        if start is None:
            *folders, name = parts
            kept = [name]
        else:
            folders = parts[:start]
            kept = parts[start:]
        # less stays than of a kernel's name: ids of runs stand in names of files
        cleaned = [self._clean_words(part, is_plain) for part in kept]
        is_root = start is not None and kept[0] in (*_INSTALLED, "lib")
        if folders and not is_root:
            cleaned.insert(0, self.replace(Secret.PATH, "/".join(folders)))
        elif folders:
            self.taken[Secret.PATH, self.where].add("/".join(folders))
        # what is a library's file is told by the beginning of its path
        return ("/" if is_absolute else "") + "/".join(cleaned)

    def clean_frame(self, text: str) -> str:
        """A call of a stack, "function (file.py:12)"."""
        found = _OWN_FRAME.fullmatch(text)
        if found is None:
            return self.clean_name(text)
        function = self._clean_words(found["function"])
        return f"{function} ({self.clean_path(found['path'])}{found['line'] or ''})"

    def clean_command(self, words: list[str]) -> list[str]:
        """A command line: names of flags, numbers, programs and files stay as far as they are known, and no keys."""
        cleaned = []
        is_secret = False
        for word in words:
            is_flag = word.startswith("-")
            # a key may have several values
            is_secret = is_secret and not is_flag and not word.endswith(_SCRIPTS)
            cleaned.append(self.clean_text(word) if is_secret else self._clean_word_of_command(word))
            if is_flag:
                is_secret = names_secret(word)
        return cleaned

    def _clean_word_of_command(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        if equals and names_secret(flag):
            return f"{self._clean_words(flag)}={self.clean_text(value)}"
        if flag.startswith("-"):
            flag = self._clean_words(flag)
            return f"{flag}{equals}{self._clean_word_of_command(value)}" if equals else flag
        if _SENTENCE.search(word):
            return self.clean_text(word)
        if PurePosixPath(word).suffix in _SCRIPTS or "/" in word:
            return self.clean_path(word)
        return word if self._is_known_label(word) else self.clean_text(word)


_FORMS = (
    (Secret.URL, _URL),
    (Secret.URL, _REMOTE),
    (Secret.EMAIL, _EMAIL),
    (Secret.ADDRESS, _IPV4),
    (Secret.ADDRESS, _DASHED_IPV4),
    (Secret.ADDRESS, _IPV6),
    (Secret.ADDRESS, _SHORT_IPV6),
    (Secret.ADDRESS, _MAC),
    (Secret.HOST, _DOMAIN),
    (Secret.ID, _GROUPED_NUMBER),
)


def names_secret(name: str) -> bool:
    """Whether a flag or a variable has a key or somebody's name for its value, which no known word makes harmless."""
    return (_NAME_OF_KEY.search(name) or _NAME_OF_OWNER.search(name)) is not None


def _means_something(label: str) -> bool:
    """Whether a report takes a label for a phase, a step or a cause: then its known words stay, as in a name."""
    if len(label) > MAX_LABEL_LETTERS or len(RUN.findall(label)) > MAX_WORDS_OF_MEANING:
        return False
    return bool(find_meaning(label)) or find_step_family(label) >= 0 or name_cause(label, "range") is not None


def _shorten_host(text: str) -> str:
    """A machine's name without its domain; an address as it is."""
    is_address = _IPV4.fullmatch(text) or ":" in text
    return text.lower() if is_address else text.partition(".")[0].lower()


def _find_package(parts: list[str], is_absolute: bool) -> int | None:
    """The first part that lies in an installed package, or in Python's own library; None for a file of a program.

    Args:
        parts: The path's folders and the file.
        is_absolute: Whether the path begins at the root.
    """
    for number in reversed(range(len(parts) - 1)):
        if parts[number] in _INSTALLED:
            return number
    for number in range(len(parts) - 1):
        if parts[number] == "lib" and _OWN_LIBRARY.fullmatch(parts[number + 1]):
            return number
    for number in range(len(parts) - 1):
        is_plain_name = parts[number] in _PLAIN_PACKAGES
        if parts[number] in PACKAGES and not (is_plain_name and (number or is_absolute)):
            return number
    return None


def _to_letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ... for 1, 2, ..."""
    letters = ""
    while number:
        number, at = divmod(number - 1, 26)
        letters = chr(ord("A") + at) + letters
    return letters
