"""MaxText's checkpoints as a form of models that runs start from."""

from __future__ import annotations

from collections.abc import Sequence

from maxbatch.around.maxtext.checkpoints.folder import is_maxtext
from maxbatch.around.maxtext.checkpoints.names import scanned_name
from maxbatch.config.model_forms import ModelForm, ModelPath


class MaxTextForm(ModelForm):
    """A run of MaxText, one of its checkpoints, or that checkpoint's items."""

    phrase = "a checkpoint of MaxText"

    def holds(self, path: ModelPath) -> bool:
        return is_maxtext(str(path))

    def parameter_path(self, names: Sequence[str], decoder_block: str) -> str | None:
        name = scanned_name(names, decoder_block)
        return None if name is None else name.replace(".", "/")


FORM = MaxTextForm()
