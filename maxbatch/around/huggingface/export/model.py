"""Models as Hugging Face folders: `config.json`, `generation_config.json`, safetensors and the
tokenizer's files.
"""

from __future__ import annotations

from maxbatch.around.huggingface.arrays.writing import write_folder
from maxbatch.around.huggingface.folder.files import is_exported
from maxbatch.config.values import shown_path
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.experts import ROUTED_BIAS
from maxbatch.parallel.hosts import warn
from maxbatch.run.weights.parameters import OpenedModel, read_model
from maxbatch.system.errors import ConfigError, writing
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.storage import AnyPath, as_path

# Families whose files hold a bias of each router: one of zeros if the model has none.
_BIASES = {
    name: [f"{ROUTED_BIAS}=true"]
    for name, family in FAMILIES.items()
    if f"experts.{ROUTED_BIAS}" in family.tensors
}


def export_model(
    model: str, output: str, dtype: str | None, averaged: bool = False, base: str = ""
) -> str:
    """Writes a model as a Hugging Face folder, atomically; returns a summary to print.

    Args:
      model: a run folder, one of its checkpoints, or a Hugging Face folder.
      output: the folder to write, new or empty.
      dtype: of the tensors; None: that of the checkpoint or the folder, so that nothing is rounded.
      averaged: whether to write the average of the parameters that the run keeps.
      base: where the model that a run's adapters adapt is now; "": at the path that the run states.

    Raises:
      ConfigError: there is no such model, its family cannot express its keys, or the output is not
        empty.
    """
    target = new_folder(output)

    def write(opened: OpenedModel) -> str:
        config, written_as = opened.config, dtype or opened.dtype
        if config.model.capacity_factor > 0:
            warn(
                f"capacity_factor={config.capacity_factor:g} is no part of the export: Hugging "
                "Face's models drop nothing"
            )
        with writing(output):
            num_files, num_bytes = write_folder(
                target, config.decoder, config.stream, opened.abstract, opened.read, written_as
            )
        files = "1 file" if num_files == 1 else f"{num_files} files"
        model_type = FAMILIES[config.decoder_block].model_type
        return f"{model_type}, {num_bytes / 1e6:,.1f} MB of {written_as} in {files}, in {output}"

    return read_model(model, write, averaged, base, overrides=_BIASES)


def new_folder(output: str) -> AnyPath:
    """Returns the path of a folder to write.

    Raises:
      ConfigError: it is neither new nor empty, nor the half that an export left when it was killed.
    """
    target = as_path(output)
    if not target.exists():
        return target
    names = [path.name for path in target.iterdir()] if target.is_dir() else [""]
    others = [name for name in names if not name.startswith(BUILDING)]
    is_half = len(others) < len(names) and all(map(is_exported, others))
    if others and not is_half:
        raise ConfigError(f"--output {shown_path(target)}: must be a new folder or an empty one")
    return target
