"""The ways to add a thing, as CONTRIBUTING.md counts them: a toy of each in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.pages import blocks_of
from tests.helpers.transformers_models import COMMON, VOCABULARY

ROOT = Path(__file__).parents[1]


class Copy:
    """A copy of the package, with additions.

    Args:
      files: new files by their path in the package.
      rows: texts that are added behind the first occurrence of another one, by file.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str], rows: Mapping[str, tuple[str, str]]
    ) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "maxbatch", folder / "maxbatch")  # with what Python compiled of it
        shutil.copytree(ROOT / "configs", folder / "configs")
        for name, text in files.items():
            file = folder / "maxbatch" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        for name, (behind, row) in rows.items():
            file = folder / "maxbatch" / name
            text = file.read_text()
            assert behind in text, (name, behind)
            file.write_text(text.replace(behind, f"{behind}{row}", 1))
        subprocess.run(
            [sys.executable, "-m", "maxbatch.config.base_yml"], cwd=folder, env=self._variables
        )

    @property
    def _variables(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder), "JAX_PLATFORMS": "cpu"}

    def __call__(self, *arguments: str) -> str:
        """Runs a `maxbatch` command of the copy; returns its output."""
        done = subprocess.run(
            [sys.executable, "-m", "maxbatch", *arguments],
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def runs(self, code: str) -> str:
        """Runs Python beside the copy; returns its output."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.runs
def test_an_optimizer_is_two_rows(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {},
        {
            "config/sections.py": ('opt_type: Literal["adamw", ', '"sign", '),
            "update/optimizers.py": (
                '] = {"adamw": _adam, ',
                '"sign": lambda config, b1, b2: optax.scale_by_sign(), ',
            ),
        },
    )
    made = copy.runs(
        "import maxbatch, jax.numpy as jnp\n"
        "from maxbatch.update.optimizers import AT_REST, make_optimizer\n"
        "config = maxbatch.load_config(overrides=['opt_type=sign', 'adam_weight_decay=0'])\n"
        "optimizer = make_optimizer(config.programs.optimizer, AT_REST._replace(learning_rate=1.0))\n"
        "state = optimizer.init({'w': jnp.zeros(2)})\n"
        "print(optimizer.update({'w': jnp.array([3.0, -5.0])}, state, {'w': jnp.zeros(2)})[0]['w'])"
    )
    assert made.split() == ["[-1.", "1.]"]


_SEMICOLONS = '''"""`semicolons`: documents between semicolons."""

import re
from dataclasses import dataclass
from typing import ClassVar

from maxbatch.config.file_formats import FileFormat
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import WholeFiles, checked_utf8


@dataclass(frozen=True)
class Semicolons(WholeFiles):
    unit: ClassVar[str] = "part"

    def documents(self, piece):
        with open_file(piece.file) as file:
            for number, part in enumerate(file.read().split(b";"), 1):
                yield checked_utf8(number, part)


FORMAT = FileFormat(lambda form, field: Semicolons(), re.compile(r"[.]semicolons$"), ".semicolons")
'''


def test_a_format_of_files_is_a_file_and_a_row(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {"around/formats/semicolons.py": _SEMICOLONS},
        {
            "registered.py": (
                "    Table.FORMATS: {",
                '\n        "semicolons": "maxbatch.around.formats.semicolons:FORMAT",',
            )
        },
    )
    (tmp_path / "x.semicolons").write_text("first one;second one;third one")
    shown = copy(
        "data",
        "dataset_type=semicolons",
        "dataset_path=x.semicolons",
        "max_target_length=16",
        "packing=false",
        "enable_data_shuffling=false",
        "--count=3",
        "--json",
    )
    assert all(text in shown for text in ("first one", "second one", "third one"))


_IMPORTER = '''"""Rules of the table of a program that the table of words lacks."""

from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import per_device_equation

FORMAT = Format("toy", per_device_equation("rows"), {}, {}, program="ToyTrainer")
'''
_TABLE = """# ToyTrainer
[defaults]
rows=8

[signs]
toy_threads

[words]
rows | | per_device_batch_size |
toy_threads | | - | affects speed only
"""


def test_an_importer_is_a_table_with_its_module_and_a_row(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {"around/importers/toy.py": _IMPORTER, "around/importers/toy.txt": _TABLE},
        {
            "registered.py": (
                "    Table.IMPORTERS: {",
                '\n        "toy": "maxbatch.around.importers.toy:FORMAT",',
            )
        },
    )
    (tmp_path / "run.yml").write_text("rows: 4\ntoy_threads: 2\n")
    shown = copy("import", "auto", "run.yml", "--devices", "2")
    assert "per_device_batch_size=4" in shown and "ToyTrainer" in shown


_KIND = '''"""Toys: texts that are trained on from their third byte."""

import json

from maxbatch.kinds.text.recipe import TextRecipe


class Toys:
    identity = {"kind": "toy"}

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode_batch(self, records):
        import numpy as np

        from maxbatch.data.store.encoder import Encoded

        texts = [json.loads(record)["toy"].encode() for record in records]
        tokens = self.tokenizer.encode_utf8_batch(texts)
        return [[Encoded(ids, np.arange(len(ids)) > 1)] for ids in tokens]


class ToyRecipe(TextRecipe):
    unit = "toy"
    records = "toys"
    has_answers = True

    def encoder(self, config, tokenizer):
        return Toys(tokenizer)


RECIPE = ToyRecipe()
'''


def test_a_kind_of_sample_is_a_folder_a_row_and_its_key(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {"kinds/toy/__init__.py": "", "kinds/toy/recipe.py": _KIND},
        {
            "registered.py": (
                "    Table.KINDS: {",
                '\n        "toy": "maxbatch.kinds.toy.recipe:RECIPE",',
            ),
            "config/sections.py": (
                'class DataConfig(Section, changes="the data"):\n'
                '    """Data: stream[0], stream[1] and so on."""\n',
                '\n    use_toy: bool = key(False, "a sample is a toy", Fixes.RECORDS, chooses="toy")',
            ),
        },
    )
    assert "toys" in copy("plan", "use_toy=true", "global_batch_size=8")
    (tmp_path / "toys.jsonl").write_text('{"toy": "abcd"}\n')
    data = ("use_toy=true", "dataset_type=jsonl", "dataset_path=toys.jsonl", "max_target_length=6")
    sample = json.loads(copy("data", *data, "--count=1", "--json"))
    assert sample["text"] == "abcd" and sample["weights"] == [0, 0, 1, 1, 0, 0]


def test_a_family_in_the_form_of_llama_is_a_record(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {},
        {
            "families/family.py": (
                "FAMILIES: dict[str, Family] = {family.decoder_block: family for family in (",
                '\n    dataclasses.replace(_LLAMA, decoder_block="toy", model_type="toy"),',
            )
        },
    )
    assert "decoder_block: toy " in copy("config", "decoder_block=toy", "vocab_size=300")


class SmolLM3(Copy):
    """A copy of the package with the family that the page on models adds."""

    def __init__(self, folder: Path) -> None:
        record, line, rows = (
            block.text for block in blocks_of("docs/models.md") if block.language == "python"
        )
        super().__init__(folder, {"families/smollm3.py": record}, {})
        self._replace("families/family.py", "\n\nDEFAULT", f"\n{line}\nDEFAULT")
        self._replace("families/family.py", "for family in (\n", "for family in (\n    SMOLLM3,")
        at = "\nFORMS_OF_SOME = ("
        self._replace(
            "around/huggingface/folder/form_rows.py", at, f"\n{rows}\n{at}_ROTATED_IN_MOST, "
        )

    def _replace(self, name: str, text: str, other: str) -> None:
        file = self.folder / "maxbatch" / name
        assert file.read_text().count(text) == 1, (name, text)
        file.write_text(file.read_text().replace(text, other))


@pytest.fixture(scope="module")
def with_smollm3(tmp_path_factory: pytest.TempPathFactory) -> SmolLM3:
    return SmolLM3(tmp_path_factory.mktemp("smollm3"))


# The `config.json` of SmolLM3-3B, and its parameters.
SMOLLM3 = {
    "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "rope_theta": 5e6,
    "rms_norm_eps": 1e-6, "no_rope_layers": [1, 1, 1, 0] * 9, "max_position_embeddings": 65536,
}  # fmt: skip
SMOLLM3_SIZE = 3_075_098_624
_IMPORTED = """
import json, sys
from maxbatch import load_config
from maxbatch.around.huggingface.folder.model_fields import config_json, model_keys
from maxbatch.families.cycle import cycle_of
from maxbatch.families.matrices import model_size
fields = json.loads(FIELDS)
keys = model_keys(fields, "config.json")
config = load_config(overrides=[f"{key}={text}" for key, text in keys.items()])
written = config_json(config.decoder, "float32", {})
rotated = [form.has_rope for form in cycle_of(config.model)]
print(json.dumps([model_size(config.model), rotated, {name: written[name] for name in fields}]))
"""


def test_the_page_on_models_adds_a_family_whose_layers_have_a_form_of_their_own(
    with_smollm3: SmolLM3,
) -> None:
    code = _IMPORTED.replace("FIELDS", repr(json.dumps(SMOLLM3)))
    size, rotated, written = json.loads(with_smollm3.runs(code))
    assert (size, rotated) == (SMOLLM3_SIZE, [True, True, True, False])
    assert written == SMOLLM3 | {"max_position_embeddings": written["max_position_embeddings"]}


_SCORED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from maxbatch.model.loss import token_logprobs
from maxbatch.run.weights.parameters import open_source, restored
source = open_source(sys.argv[1])
config = source.config(["max_target_length=40"])
graphdef, params = restored(source, config.decoder, None)
tokens = jnp.asarray(np.load(sys.argv[1] + "/tokens.npy"), jnp.int32)
made = jax.jit(lambda p: token_logprobs(nnx.merge(graphdef, p), tokens, jnp.ones_like(tokens)))
np.save(sys.argv[1] + "/logprobs.npy", np.asarray(made(params).logprobs_MxL)[:, 1:])
"""


@pytest.mark.slow
@pytest.mark.parity
def test_the_family_that_the_page_on_models_adds_is_that_of_transformers(
    with_smollm3: SmolLM3, tmp_path: Path
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.SmolLM3Config(
        **COMMON, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    model = transformers.SmolLM3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (2, 40))
    np.save(tmp_path / "tokens.npy", tokens)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits[:, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    with_smollm3.runs(_SCORED.replace("sys.argv[1]", repr(str(tmp_path))))
    found = np.load(tmp_path / "logprobs.npy")
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)


_COMMAND = '''"""`maxbatch toy`: prints a line."""


def add_arguments(parser):
    parser.add_argument("--line", default="a toy")


def run(args):
    print(args.line)
    return 0
'''


def test_a_command_is_a_module_and_a_row(tmp_path: Path) -> None:
    copy = Copy(
        tmp_path,
        {"commands/toy.py": _COMMAND},
        {
            "commands/__init__.py": (
                "COMMANDS: dict[str, Command] = {",
                '\n    "toy": Command("maxbatch.commands.toy", "Print a line.", ("maxbatch toy",)),',
            )
        },
    )
    assert copy("toy") == "a toy\n"
