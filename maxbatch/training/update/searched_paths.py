"""The paths that the patterns of `adamw_mask` are searched in: a parameter's path here and in MaxText."""

from __future__ import annotations

from collections.abc import Sequence

# MaxText's names of our parameters, by the last parts of our path; of the families' different names for a norm, those
# of llama's layers. Source: `maxtext/models/`, 0.2.5.
_OUTSIDE = {
    "embedding": "token_embedder/embedding",
    "positions": "decoder/position_embedder/embedding",
    "final_norm": "decoder/decoder_norm",
    "output": "decoder/logits_dense/kernel",
}
_IN_LAYER = {
    "attention_norm": "pre_self_attention_layer_norm",
    "attention_post_norm": "post_self_attention_norm",
    "mlp_norm": "post_self_attention_layer_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attention": "self_attention",
    "mlp": "mlp",
    "experts": "MoeBlock_0",
    "shared_experts": "shared_experts",
}
_MATRICES = {
    "gate": "wi_0/kernel", "up": "wi_1/kernel", "down": "wo/kernel", "router": "gate/kernel",
    "expert_gate": "wi_0", "expert_up": "wi_1", "expert_down": "wo",
    "query_down": "wq_a/kernel", "query_up": "wq_b/kernel", "latent": "wkv_a/kernel", "latent_up": "wkv_b/kernel",
    "query": "query/kernel", "key": "key/kernel", "value": "value/kernel", "out": "out/kernel",
    "routed_bias": "gate/bias", "router_bias": "gate/bias", "expert_gate_bias": "wi_0_bias",
    "expert_up_bias": "wi_1_bias", "expert_down_bias": "wo_bias",
    "query_down_norm": "q_norm", "latent_norm": "kv_norm",
}  # fmt: skip


def searched_paths(names: Sequence[str]) -> tuple[str, str]:
    """Returns a parameter's path here and in MaxText, whose parts are joined by slashes.

    Args:
      names: the names that lead to it here, such as layers, attention, query.
    """
    return "/".join(names), "/".join(["params", *_in_maxtext(list(names))])


def _in_maxtext(names: list[str]) -> list[str]:
    if names[0] in _OUTSIDE:
        return [_OUTSIDE[names[0]], *names[1:]]
    within = [name for name in names[1:] if not name.isdigit()]
    return ["decoder", names[0], *(_in_layer(name) for name in within)]


def _in_layer(name: str) -> str:
    name = _IN_LAYER.get(name, name)
    if name not in _MATRICES and name.endswith("_bias"):
        return _MATRICES.get(name.removesuffix("_bias"), name).replace("kernel", "bias")
    return _MATRICES.get(name, name)
