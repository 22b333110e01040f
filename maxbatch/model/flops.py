"""The floating-point operations of a model."""

from __future__ import annotations

from maxbatch.config.blocks import is_local_layer
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.model.mlp import is_gated


def model_flops_per_token(config: DecoderConfig) -> int:
    """Returns the floating-point operations of training per token, forward and backward, without recomputation.

    They are 6 per parameter that multiplies (2 forward, 4 backward; the embedding lookup multiplies nothing), and
    12 * H * h for attention per layer and token that is seen: L / 2 of them, because it is causal, and in a layer with
    a window of W < L tokens W - W * W / 2L, since the first W tokens of a row see fewer.

    Reference: Chowdhery et al. 2022, PaLM (https://arxiv.org/abs/2204.02311), appendix B.
    """
    d, h, length = config.base_emb_dim, config.head_dim, config.max_target_length
    heads, kv_heads, num_layers = config.base_num_query_heads, config.base_num_kv_heads, config.base_num_decoder_layers
    mlp_matrices = 3 if is_gated(config) else 2
    per_layer = 2 * d * h * (heads + kv_heads) + mlp_matrices * d * config.base_mlp_dim
    matrices = num_layers * per_layer + d * config.vocab_size
    windows = (min(config.sliding_window_size, length) if local else length
               for local in is_local_layer(config.attention_type, num_layers))  # fmt: skip
    twice_seen = sum(2 * window - window * window // length for window in windows)
    return 6 * (matrices + twice_seen * heads * h)
