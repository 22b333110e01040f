"""Words of a Python file: the literal arguments of its calls of Hugging Face's and TRL's config
classes.

The file is parsed, never run. A name that the file binds once, at its top level, to a literal
stands for that literal; any other argument is `${SOURCE}`, a value that the file does not state.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxbatch.around.importers.reading import state, text_of
from maxbatch.around.importers.translation import Stated
from maxbatch.config.values import shown_path
from maxbatch.system.errors import ConfigError

CLASS = "config_class"  # our word for the class that is called
CLASSES = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "DPOConfig",
    "ORPOConfig",
    "GRPOConfig",
)
# Words of arguments of further calls in the file, by call; the words that are flags there.
_BESIDE: Mapping[str, Mapping[str, str]] = {
    "LoraConfig": {
        "r": "lora_r",
        "lora_alpha": "lora_alpha",
        "target_modules": "lora_target_modules",
        "lora_dropout": "lora_dropout",
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
        "modules_to_save": "lora_modules_to_save",
    },
    "BitsAndBytesConfig": {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit"},
    "SFTTrainer": {"model": "model_name_or_path"},
    "DPOTrainer": {"model": "model_name_or_path"},
    "GRPOTrainer": {"model": "model_name_or_path"},
}
_DEFAULTS_OF_LORA = {"lora_r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}  # PEFT's
_MOST_NODES = 100_000
_MOST_BITS = 10_000  # of an integer as a text of digits


def is_python(path: Path) -> bool:
    return path.suffix.lower() == ".py"


def read_python(path: Path, number: int | None = None) -> dict[str, Stated]:
    """Reads the arguments of a config class; `number` is that of its call in the file, from 1, None
    the only one.

    Raises:
      ConfigError: the file is no Python, has no such call, several of which none is chosen, or an
        argument twice.
    """
    where = shown_path(path)
    try:
        tree = ast.parse(text_of(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{where}: is not Python") from None
    nodes = [node for _, node in zip(range(_MOST_NODES), ast.walk(tree), strict=False)]
    calls = sorted(
        (node for node in nodes if isinstance(node, ast.Call)), key=lambda call: call.lineno
    )
    configs = [call for call in calls if _name(call) in CLASSES]
    if not configs:
        raise ConfigError(
            f"{where}: no call of {', '.join(CLASSES)}, whose arguments would be read"
        )
    if number is not None and number > len(configs):
        raise ConfigError(
            f"--command {number}: {where} has {len(configs)}; works: --command {len(configs)}"
        )
    if number is None and len(configs) > 1:
        named = ", ".join(
            f"{i}: line {call.lineno}, {_name(call)}" for i, call in enumerate(configs, 1)
        )
        raise ConfigError(
            f"{where}: {len(configs)} calls state a run ({named}); works: --command 1"
        )
    config, constants = configs[(number or 1) - 1], _constants(tree)
    words: dict[str, Stated] = {CLASS: _name(config)}
    for word, value in _arguments(config, constants, where):
        state(words, word, value, where)
    for call in calls:
        for word, value in _beside(call, constants):
            words.setdefault(word, value)
    return words


def _name(call: ast.Call) -> str:
    """Returns the last name of what is called, such as `SFTConfig` in `trl.SFTConfig(...)`."""
    function = call.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _constants(tree: ast.Module) -> dict[str, object]:
    """Returns the literals of names that the file binds once, at its top level."""
    bound = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    constants: dict[str, object] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name) and bound[target.id] == 1:
                try:
                    constants[target.id] = ast.literal_eval(statement.value)
                except (ValueError, TypeError, RecursionError, MemoryError):
                    continue  # computed: the name stands for itself
    return constants


def _arguments(
    call: ast.Call, constants: Mapping[str, object], where: str
) -> Iterator[tuple[str, Stated]]:
    if call.args:
        raise ConfigError(
            f"{where}:{call.lineno}: {_name(call)} must be called with names of its arguments"
        )
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ConfigError(
                f"{where}:{call.lineno}: {_name(call)}(**...): its arguments must be literals"
            )
        value = _value(keyword.value, constants)
        inner = value if isinstance(value, dict) else None
        if inner and all(isinstance(name, str) for name in inner):
            yield from ((f"{keyword.arg}.{name}", _text(item)) for name, item in inner.items())
        else:
            yield keyword.arg, _text(value)


def _beside(call: ast.Call, constants: Mapping[str, object]) -> Iterator[tuple[str, Stated]]:
    """Yields words of adapters, of parameters in few bits, of the model and of the data."""
    name, words = _name(call), _BESIDE.get(_name(call), {})
    arguments = {
        words[k.arg]: _value(k.value, constants) for k in call.keywords if k.arg and k.arg in words
    }
    if name == "LoraConfig":
        arguments = {**_DEFAULTS_OF_LORA, **arguments, "use_peft": True}
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_model = isinstance(owner, ast.Name) and "ForCausalLM" in owner.id
    if name == "from_pretrained" and is_model and call.args:
        arguments["model_name_or_path"] = _value(call.args[0], constants)
    if name == "load_dataset" and call.args:
        arguments["dataset_name"] = _value(call.args[0], constants)
    for word, value in arguments.items():
        is_name = word in ("model_name_or_path", "dataset_name")
        if not is_name or (isinstance(value, str) and not value.startswith("${")):
            yield word, _text(value)


def _value(node: ast.expr, constants: Mapping[str, object]) -> object:
    """Returns a literal's value, that of a name bound to one, or `${SOURCE}`."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        pass
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        source = ast.unparse(node)
    except RecursionError:
        source = ""
    return f"${{{re.sub(r'[^A-Za-z0-9_]+', '_', source).strip('_')[:40] or 'VALUE'}}}"


def _text(value: object) -> Stated:
    """Returns a value as a file of YAML would state it."""
    if isinstance(value, list | tuple | set):
        return [item if isinstance(item, str | dict) else _scalar(item) for item in value]
    return json.dumps(value) if isinstance(value, dict) else _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else str(value)
