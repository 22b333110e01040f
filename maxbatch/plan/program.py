"""Rules of the compiled update for a config on its devices, checked by `plan` and `train` before
there are devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import ModelConfig
from maxbatch.families.cycle import cycle_of
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
    has_sinks = FAMILIES[model.decoder_block].attention.has_sinks
    no_sinks = f"have no sinks, and decoder_block={model.decoder_block}"
    has_ring = context > 1 and model.context_parallel_strategy == "ring"
    shards = 1 if model.context_parallel_strategy == "ulysses" else context
    parts = 2 if has_ring and model.context_parallel_load_balance else 1  # of a share
    block = f"{LANES} x {shards} context shards" if shards > 1 else f"{LANES}"
    return {
        "splash": [
            (
                length % (LANES * shards * parts) == 0,
                f"have max_target_length={length} divisible by {block}{' x 2 parts' * (parts - 1)}",
            ),
            (not has_sinks or has_ring, no_sinks),  # a ring adds them to the kernels' sums
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
                shards == 1,
                f"have the whole length on a device, and the context axis has {shards}",
            ),
            (not cap, f"have attn_logits_soft_cap=0, not {cap:g}"),
            (not has_sinks, no_sinks),
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


def check_context_strategy(config: PlanConfig, sizes: Mapping[str, int]) -> None:
    """Raises Refusal for a strategy that cannot split attention over a context axis.

    Args:
      sizes: of the mesh's axes.
    """
    model, context = config.model, sizes["context"]
    strategy, length = model.context_parallel_strategy, config.length.max_target_length
    balance = model.context_parallel_load_balance

    def refuse(key: str, rule: str, **works: str) -> Refusal:
        return Refusal(config, key, rule, works)

    if context == 1:
        return
    if strategy != "ulysses" and balance and length % (2 * context):
        rule = f"must be false for max_target_length={length}, which 2 x {context} devices do not divide"
        raise refuse("context_parallel_load_balance", rule, context_parallel_load_balance="false")
    if strategy == "all_gather":
        return
    if any(form.attention.state_operations(model) is not None for form in cycle_of(model)):
        rule = (
            f"must be all_gather for decoder_block={model.decoder_block}, whose layers have states"
        )
        raise refuse("context_parallel_strategy", rule, context_parallel_strategy="all_gather")
    heads, shards = model.base_num_query_heads, sizes["tensor"] * context
    if strategy == "ulysses" and heads % shards:
        rule = (
            f"must be all_gather or ring for {heads} heads on tensor x context = {shards} devices"
        )
        raise refuse("context_parallel_strategy", rule, context_parallel_strategy="ring")
