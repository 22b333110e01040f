"""Hugging Face folders as a form of models that runs start from."""

from __future__ import annotations

from maxbatch.around.huggingface.folder.config_json import (
    CONFIG_FILE,
    is_huggingface_folder,
    keys_of_folder,
    stated_end_tokens,
    stated_length,
)
from maxbatch.config.model_forms import ModelForm, ModelPath
from maxbatch.config.values import shown_path


class HuggingFaceForm(ModelForm):
    """A folder with `config.json` and safetensors, or a model's name on the hub."""

    phrase = "a Hugging Face folder"

    def holds(self, path: ModelPath) -> bool:
        return is_huggingface_folder(path)

    def keys(self, path: ModelPath) -> dict[str, str] | None:
        return keys_of_folder(path) if is_huggingface_folder(path) else None

    def file_of_keys(self, path: ModelPath) -> str:
        return f"{shown_path(path)}/{CONFIG_FILE}"

    def end_tokens(self, path: ModelPath) -> tuple[int, ...]:
        return stated_end_tokens(path) if is_huggingface_folder(path) else ()

    def context_length(self, path: ModelPath) -> int:
        return stated_length(path) if is_huggingface_folder(path) else 0


FORM = HuggingFaceForm()
