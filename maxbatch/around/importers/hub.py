"""Names on Hugging Face's hub, and the commands that download them."""

from __future__ import annotations

from maxbatch.config.hub import hub_name


def is_hub_name(path: str) -> bool:
    """Returns whether a path is a name of the hub, and none of MaxText's own files."""
    return hub_name(path) is not None and not path.startswith("assets/")


def hub_step(name: str, kind: str = "") -> str:
    """Returns the command that downloads a model or (`kind` dataset) a data set to the path of its
    name.
    """
    download = f"hf download {f'--repo-type {kind} ' if kind else ''}{name} --local-dir {name}"
    if kind:
        return f"{download}, in the folder where training starts"
    return f"pip install huggingface_hub, or {download} and give the folder"
