"""Types every `works:` of an error as it stands, after the test that met the error.

The plugin watches `ConfigError`, so a message that is written tomorrow is typed too. An error
counts if it left the code under test: a test caught it, or the command line printed it. Its
traceback tells what was stated: the arguments of a command, the file and the overrides of a config,
or a config and the devices of a plan. The same statement with the settings after `works:` must be
accepted, and must keep all else that was stated. A `works:` that is no settings, flags or command
must match a row of `NOT_TYPED`, which says why nobody can type it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest

from maxbatch.cli import main, make_parser
from maxbatch.commands import COMMANDS
from maxbatch.commands.arguments import config_of
from maxbatch.config.config import Config
from maxbatch.config.keys import Part
from maxbatch.config.loading import load_config
from maxbatch.config.sections import KEYS, names_of
from maxbatch.config.unknown import UnknownKeys
from maxbatch.config.values import counted, value_text
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.refusal import Refusal
from maxbatch.system.errors import ConfigError

# errors of one line of code that a test has typed; property tests raise thousands
_MOST_OF_LINE = 3
# of one line of code that a test keeps, including those that the code itself catches
_MOST_KEPT = 12
_MOST_OF_SESSION = 40  # of one line of code that a session has typed
_MOST_TRIES = 8  # a statement may have several faults, each with its own message
_MACHINE = ("num_devices", "num_hosts", "num_slices")
_IN_A_FILE = re.compile(r"[^\s=]+:\d+: ")  # the place of a word, at the beginning of a message
_ALTERNATIVES = re.compile(r",? or |(?<=\)), ")

# What stands after `works:` and is no setting of the command at hand: a pattern, and why it is not
# typed.
NOT_TYPED: Mapping[str, str] = {
    r".*; skip_bad_records=true leaves such records out": "offers two ways",
    r".* left out|leave .* out|without .*|(--\S+|[A-Z_]+) without .*|no .*|none": "says which word to leave out",
    r"(pip install|cd into|`wandb|[A-Z][A-Z_]+=).*": "is for the shell",
    r"\[.*\]|\{.*\}|\w+: .*|<<: .*": "is a line of a YAML file, which the file's own tests type",
    r"(weight|sampler|pruner|metric|parallel|trials|seed|sweep_dir|storage)=.*|sweep_dir, .*":
        "is a line of a mixture or of a sweep file",
    r"\w+=\d+ x nodes": "counts nodes that nobody stated",
    r"maxbatch\.\w+\(.*|overrides=\[.*|outputs=\[.*|np\.asarray.*|\w+\.real and .*|reference=.*": "is Python",
    r"\w+\(.*\)|\{'tokens': .*|module:function.*|(length|updates|devices|hosts)=\S+": "is Python",
    r"(a|an|another|the|at least|as many|fewer|once|one|more|put|name|state|if|in|on|all|lines|give)\b.*":
        "is advice about files or values that only the user has",
    r".* and (a dataset of|\w+ for) documents|.*, for documents|.* with tokenizer_path, .*":
        "is a setting beside data that only the user has",
    r".*\b[A-Z]{3,}\b.*|--\S+, which .*": "is a flag with a place that only the user has",
    r"[^\s=]+|(\S*/\S*\s?)+": "takes the place of the word, or of the path, that was wrong",
    r"eval_stream=rows\b.*|eval_fraction of a stream .*|which returns .*": "is an argument of Python",
    r"own_parts='' for .*": "leaves the user's own parts out on purpose",
    r"key=.*": "is of a key that a test made up",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Statement:
    """What was stated: a config's file and overrides, and the machine of a plan."""

    path: Any
    overrides: tuple[str, ...]
    machine: Mapping[str, Any] | None = None  # arguments of a plan; None: the config alone was read
    replaced: Config | None = None  # a config that no overrides state

    def with_settings(self, settings: Mapping[str, str], error: ConfigError) -> Statement:
        """Returns the statement with settings in place of their keys' texts, and of unknown
        keys.
        """
        machine = None if self.machine is None else dict(self.machine)
        for name in _MACHINE:
            if machine is not None and name in settings:
                machine[name] = int(settings[name])
        typed = {name: text for name, text in settings.items() if name in KEYS}
        if self.replaced is not None:
            values = {name: KEYS[name].read(text) for name, text in typed.items()}
            return dataclasses.replace(
                self, machine=machine, replaced=self.replaced.replaced(values)
            )
        left = [text for text in self.overrides if not _is_replaced(text, typed, error)]
        overrides = (*left, *(f"{name}={text}" for name, text in typed.items()))
        return dataclasses.replace(self, overrides=overrides, machine=machine)

    def read(self) -> tuple[Config, BatchPlan | None]:
        config = self.replaced or load_config(self.path, self.overrides)
        return config, None if self.machine is None else BatchPlan.from_config(
            config, **self.machine
        )

    @property
    def stated(self) -> dict[str, str]:
        """The texts of the overrides by key, the last of each."""
        pairs = (text.partition("=")[::2] for text in self.overrides)
        return {name.strip(): text for name, text in pairs if name.strip() in KEYS}


def _is_replaced(override: str, settings: Mapping[str, str], error: ConfigError) -> bool:
    """Returns whether who types the settings leaves an override out: the key's own, or an unknown
    word.
    """
    name = override.partition("=")[0].strip()
    return name in settings or (isinstance(error, UnknownKeys) and name not in KEYS)


class Typist:
    """Keeps the errors of a test, and types what they say works."""

    def __init__(self) -> None:
        self._kept: list[ConfigError] = []
        self._of_line: Counter[tuple[str, int]] = Counter()
        self._is_typing = False
        self._of_session: Counter[str] = Counter()

    def watch(self) -> None:
        """Keeps every `ConfigError` from now on."""
        typist = self

        def remember(error: ConfigError, *arguments: object) -> None:
            super(ConfigError, error).__init__(*arguments)
            typist.keep(error)

        ConfigError.__init__ = remember  # type: ignore[method-assign]

    def stop(self) -> None:
        if "__init__" in vars(ConfigError):
            del ConfigError.__init__

    def keep_nothing(self) -> None:
        self._kept, self._of_line = [], Counter()

    def keep(self, error: ConfigError) -> None:
        if self._is_typing:
            return
        line = _raised_at(sys._getframe(2))
        self._of_line[line] += 1
        if self._of_line[line] <= _MOST_KEPT:
            self._kept.append(error)

    def said(self) -> list[ConfigError]:
        """Returns the errors that left the code under test, of those that were kept."""
        return [
            error
            for error in self._kept
            if error.__traceback__ is not None and _was_said(list(_frames(error)))
        ]

    def faults(self, are_all_typed: bool = False) -> list[str]:
        """Returns what is wrong with the `works:` of the errors that were kept, and forgets
        these.

        Args:
          are_all_typed: types errors of a line of code however many were typed before.
        """
        said = self.said()
        self.keep_nothing()
        faults, seen, of_line = list[str](), set[str](), Counter[str]()
        self._is_typing = True
        try:
            for error in said:
                frames = list(_frames(error))
                message = str(error)
                if "works: " not in message or message in seen:
                    continue
                seen.add(message)
                line = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"
                of_line[line] += 1
                self._of_session[line] += 1
                are_enough = (
                    of_line[line] > _MOST_OF_LINE or self._of_session[line] > _MOST_OF_SESSION
                )
                if are_all_typed or not are_enough:
                    faults += faults_of(message, error, frames)
        finally:
            self._is_typing = False
        return faults


TYPIST = Typist()


def pytest_configure(config: pytest.Config) -> None:
    TYPIST.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    TYPIST.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test in which an error named something that does not work."""
    try:
        yield
    except BaseException:
        TYPIST.keep_nothing()
        raise
    faults = TYPIST.faults()
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yields the frames that an error left, the outermost first."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _raised_at(frame: FrameType | None) -> tuple[str, int]:
    """Returns the line that made an error, outside of the functions that only word it."""
    while frame is not None and frame.f_code.co_name in (
        "__init__",
        "fault",
        "refusal",
        "error",
        "remember",
    ):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "maxbatch"


def _was_said(frames: Sequence[FrameType]) -> bool:
    """Returns whether a test caught the error, or the command line printed it."""
    return not _is_ours(frames[0]) or any(_is_at(frame, "maxbatch.cli", "_run") for frame in frames)


def _is_at(frame: FrameType, module: str, function: str) -> bool:
    return frame.f_globals.get("__name__") == module and frame.f_code.co_name == function


def faults_of(message: str, error: ConfigError, frames: Sequence[FrameType]) -> list[str]:
    """Returns what is wrong with each alternative after `works:`."""
    faults = []
    for text in _alternatives(message):
        words = _typed(text)
        if words is None:
            if not any(re.fullmatch(pattern, text) for pattern in NOT_TYPED):
                faults.append(
                    f"{message}\n  works: {text!r} cannot be typed; if nobody could, NOT_TYPED says why"
                )
            continue
        fault = _fault_of_words(words, error, message, frames)
        if fault:
            faults.append(f"{message}\n  typed {text!r}: {fault}")
    return faults


def _alternatives(message: str) -> list[str]:
    text = message.rpartition("works: ")[2].partition("; to convert a config")[0]
    return [re.sub(r" \([^()]*\)$", "", part).strip() for part in _ALTERNATIVES.split(text)]


def _typed(text: str) -> list[str] | None:
    """Returns the words of settings, flags or a command; None for a text that is none of them."""
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if words[:1] == ["maxbatch"]:
        return words if words[1:2] and words[1] in COMMANDS else None
    is_value = False
    for word in words:
        if word.startswith("--"):
            is_value = "=" not in word
        elif word.partition("=")[0] in (*KEYS, *_MACHINE) and "=" in word:
            is_value = False
        elif not is_value:
            return None
    return words or None


def _fault_of_words(
    words: list[str], error: ConfigError, message: str, frames: Sequence[FrameType]
) -> str | None:
    argv = next(
        (frame.f_locals.get("argv") for frame in frames if _is_at(frame, "maxbatch.cli", "_run")),
        None,
    )
    if words[0] == "maxbatch":
        return _fault_of_arguments(words[1:], message)
    flags = [word for word in words if word.startswith("--")]
    if isinstance(error, UnknownKeys) and _IN_A_FILE.match(message) and not flags:
        # Who types the settings takes the unknown words out of the file.
        return _fault_of_values(dict(word.split("=", 1) for word in words))
    if argv:
        return _fault_of_arguments(
            _with_words(list(argv), words, error, message.split()[0].rstrip(":")), message
        )
    if flags:
        # of a function that a test called by itself, with the flags of a command that it does not
        # name
        return None
    statement = _statement(frames)
    settings = dict(word.split("=", 1) for word in words)
    if statement is None:
        return _fault_of_values(settings)
    return _fault_of_statement(statement, settings, error, message)


def _with_words(argv: list[str], words: Sequence[str], error: ConfigError, wrong: str) -> list[str]:
    """Returns arguments with words typed behind them, in place of their flags, their keys, and
    unknown words.

    `wrong` is the word that the message is about: a flag, or one that is neither a flag nor a
    setting.
    """
    settings = dict(
        word.split("=", 1) for word in words if "=" in word and not word.startswith("-")
    )
    flags = {word.partition("=")[0] for word in (*words, wrong) if word.startswith("--")}
    known = make_parser(argv[0])._option_string_actions if argv[0] in COMMANDS else {}
    left, is_left_out = list[str](), False
    for word in argv[1:]:
        if word == wrong:
            continue
        name = word.partition("=")[0]
        if word.startswith("-"):
            is_left_out = name in flags or name not in known
        elif "=" in word:
            is_left_out = False
        if not is_left_out and not ("=" in word and _is_replaced(word, settings, error)):
            left.append(word)
    return [argv[0], *left, *words]


def _fault_of_arguments(argv: Sequence[str], message: str) -> str | None:
    """Returns why a command does not take its arguments: `plan` runs, others read their arguments
    and config.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        if argv[0] == "plan":
            code, text = main(list(argv)), said.getvalue()
        else:
            code, text = 0, ""
            try:
                args = make_parser(argv[0], argv[1:]).parse_intermixed_args(list(argv[1:]))
                if hasattr(args, "config"):
                    config_of(args)
            except ConfigError as error:
                code, text = 2, str(error)
    same = " ".join(text.split()).endswith(" ".join(message.split()))
    return f"refused again: {text.strip()}" if code == 2 and same else None


def _statement(frames: Sequence[FrameType]) -> Statement | None:
    """Returns what was stated, from the outermost function that takes a config or reads one."""
    for frame in frames:
        local = frame.f_locals
        if _is_at(frame, "maxbatch.config.loading", "resolve"):
            overrides = local["overrides"]
            return Statement(local["path"], tuple(overrides)) if _are_texts(overrides) else None
        if _is_at(frame, "maxbatch.plan.batch", "from_config"):
            names = ("num_devices", "num_hosts", "num_slices", "samples_per_epoch", "resume")
            return _of_config(local.get("config"), {name: local[name] for name in names})
        if _is_at(frame, "maxbatch.plan.rampup", "from_config"):
            machine = {"num_devices": local["num_devices"], "num_slices": local["num_slices"]}
            return None if any(local["anchor"]) else _of_config(local.get("config"), machine)
    return None


def _are_texts(overrides: object) -> bool:
    return isinstance(overrides, list | tuple) and all(isinstance(text, str) for text in overrides)


def _of_config(config: object, machine: Mapping[str, Any]) -> Statement | None:
    """Returns overrides that state a config; the config itself where none do."""
    if not isinstance(config, Config):
        return None
    texts = {
        name: value_text(value)
        for name, value in config.items()
        if value != KEYS[name].default_value
    }
    overrides = tuple(f"{name}={text}" for name, text in texts.items())
    with contextlib.suppress(ConfigError):
        if load_config(None, overrides) == config:
            return Statement(None, overrides, machine)
    return Statement(None, (), machine, config)


def _fault_of_values(settings: Mapping[str, str]) -> str | None:
    """Returns why the values of keys cannot be read, for an error of a function that takes no
    config.
    """
    for name, text in settings.items():
        if name in KEYS:
            try:
                KEYS[name].read(text)
            except ConfigError as error:
                return str(error)
    return None


def _fault_of_statement(
    statement: Statement, settings: Mapping[str, str], error: ConfigError, message: str
) -> str | None:
    typed = statement.with_settings(settings, error)
    named = set(settings)
    messages = [message]
    for _ in range(_MOST_TRIES):
        try:
            config, plan = typed.read()
        except ConfigError as further:
            text = str(further)
            is_elsewhere = statement.path is not None or text.startswith("environment variable")
            if text in messages and is_elsewhere:
                # the value is in a file or in the environment, and is to be changed there
                return None
            if text in messages:
                return f"refused again: {text}"
            if isinstance(error, Refusal):
                return f"still refused: {text}"
            messages.append(text)
            words = _typed(_alternatives(text)[0]) if "works: " in text else None
            if (
                words is None
                or not all("=" in word for word in words)
                or any(w.startswith("-") for w in words)
            ):
                return None  # another fault, for which nothing can be typed
            more = dict(word.split("=", 1) for word in words)
            typed, named = typed.with_settings(more, further), named | set(more)
        else:
            return _changed(statement, typed, config, plan, named)
    return f"a circle: {messages}"


def _changed(
    before: Statement, after: Statement, config: Config, plan: BatchPlan | None, named: set[str]
) -> str | None:
    """Returns which statement the settings changed beside those that they name; None if they kept
    all.
    """
    for name, text in before.stated.items():
        if name in named:
            continue
        try:
            value = KEYS[name].read(text)
        except ConfigError:
            continue  # the text is what was wrong
        if value is not None and config[name] != value:
            return f"changes {name}={text} to {value_text(config[name])}"
    if plan is None:
        return None
    stated = {name: before.replaced[name] for name in KEYS} if before.replaced else before.stated
    length = {
        name: stated[name]
        for name in names_of(Part.LENGTH)
        if stated.get(name) not in (None, "null")
    }
    others = {name for name in named & set(names_of(Part.LENGTH)) if config[name] is not None}
    if (
        list(length) == ["steps"]
        and others == {"train_samples"}
        and int(length["steps"]) != plan.total_steps
    ):
        return f"changes the run of {length['steps']} updates to {plan.total_steps}"
    unit = (
        plan.batch_shards
        * plan.num_pipeline_microbatches
        * (config.gradient_accumulation_steps or 1)
    )
    if "global_batch_size" in named and stated.get("global_batch_size") not in (None, "null"):
        old = counted(str(stated["global_batch_size"]), config.plan.slots_per_sample)
        now = plan.global_batch_size_to_train_on
        if old and config.global_batch_size and abs(now - old) > max(unit / 2, unit - old, 1):
            return f"makes the batch of {old} one of {now}"
    if "batch_size_schedule" in named and stated.get("batch_size_schedule") not in (None, "null"):
        return _changed_schedule(
            str(stated["batch_size_schedule"]), plan, config.plan.slots_per_sample, unit
        )
    return None


def _changed_schedule(stated: str, plan: BatchPlan, slots: int, unit: int) -> str | None:
    """Returns which stage of a schedule is another one, or is lost."""
    pairs = [word.partition(":")[::2] for word in stated.replace(",", " ").split()]
    stages = {counted(left, slots): counted(right, slots) for left, right in pairs}
    if None in stages or not all(stages.values()) or 0 not in stages:
        return None  # not a schedule, so there is nothing to keep
    for threshold, batch in stages.items():
        assert threshold is not None and batch is not None
        now = plan.manager.batch_size_at(-(-threshold.numerator // threshold.denominator))
        if abs(now - batch) > max(unit / 2, unit - batch, 1):
            return f"makes the batch of {batch} from sample {threshold} on one of {now}"
    return None
