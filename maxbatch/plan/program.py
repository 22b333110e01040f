"""Rules of the compiled update for a config on its devices, checked by `plan` and `train` before
there are devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import ModelConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import attention_widths
from maxbatch.plan.refusal import Refusal

LANES = 128  # of a TPU's vector registers; the blocks of splash attention are multiples of it

Kernel = Literal["dot_product", "cudnn", "splash"]  # of the attention
# by kernel: whether each rule holds, and its words
Rules = Mapping[Kernel, Sequence[tuple[bool, str]]]


def attention_rules(model: ModelConfig, length: int, context: int) -> Rules:
    """Returns the rules of the attention kernels for rows of a length, on a context axis of a
    size.
    """
    head_dim = max(*attention_widths(model, is_local=True), *attention_widths(model))
    cap, of_head = model.attn_logits_soft_cap, FAMILIES[model.decoder_block].attention.head_width
    if of_head == "head_dim" and head_dim != model.head_dim:
        of_head = "2 x head_dim"
    no_sinks = (
        not FAMILIES[model.decoder_block].attention.has_sinks,
        f"have no sinks, and decoder_block={model.decoder_block}",
    )
    block = f"{LANES} x {context} context shards" if context > 1 else LANES
    return {
        "splash": [
            (
                length % (LANES * context) == 0,
                f"have max_target_length={length} divisible by {block}",
            ),
            no_sinks,
        ],
        # Every cuDNN from 9 on has a masked kernel, backward too, for these dtypes and shapes.
        "cudnn": [
            (model.dtype == "bfloat16", f"have dtype=bfloat16, and dtype={model.dtype}"),
            (
                head_dim <= 128 and head_dim % 8 == 0,
                f"have {of_head}={head_dim} at most 128 and divisible by 8",
            ),
            (length % 2 == 0, f"have max_target_length={length} even"),
            (
                context == 1,
                f"have the whole length on a device, and the context axis has {context}",
            ),
            (not cap, f"have attn_logits_soft_cap=0, not {cap:g}"),
            no_sinks,
        ],
        "dot_product": [],
    }


def check_attention(config: PlanConfig, context: int) -> None:
    """Raises Refusal for a stated kernel that does not take these shapes on any device."""
    if (kernel := config.model.attention) == "auto":
        return
    rules = attention_rules(config.model, config.length.max_target_length, context)
    broken = [rule for holds, rule in rules[kernel] if not holds]
    if broken:
        raise Refusal(config, "attention", f"must {broken[0]}", {"attention": "auto"})
