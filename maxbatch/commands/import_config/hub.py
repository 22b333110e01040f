"""Names on Hugging Face's hub, and the commands that download them."""

from __future__ import annotations

import os
import re

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


def is_hub_name(path: str) -> bool:
    """Returns whether a path is a hub name, `owner/name`, and no local path."""
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith("assets/") and not os.path.lexists(path)


def hub_step(name: str, kind: str = "") -> str:
    """Returns the command that downloads a model or (`kind` dataset) a data set to the path of its name."""
    download = f"hf download {f'--repo-type {kind} ' if kind else ''}{name} --local-dir {name}"
    if kind:
        return f"{download}, in the folder where training starts"
    return f"pip install huggingface_hub, or {download} and give the folder"
