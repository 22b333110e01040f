"""The floating-point operations of a model."""

from __future__ import annotations

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import cycle_of, local_layers
from maxbatch.families.matrices import active_size_of, parameters


def model_flops_per_token(config: DecoderConfig) -> int:
    """Returns the floating-point operations of training per token, forward and backward, without
    recomputation.

    They are 6 per parameter that multiplies a token (2 forward, 4 backward; the embedding lookup
    multiplies nothing, and of a layer's experts only those that the token goes to), and 12 * H * h
    for attention per layer and token that is seen (h is the mean width of a key and a value, where
    they differ): L / 2 of them, because it is causal, and in a layer with a window of W < L tokens
    W - W * W / 2L, since the first W tokens of a row see fewer. Forms of attention that differ state
    their own (`AttentionForm.twice_seen`, `AttentionForm.state_operations`).

    Reference: Chowdhery et al. 2022, PaLM (https://arxiv.org/abs/2204.02311), appendix B.
    """
    # An embedding that is the output projection too multiplies once, as that.
    multiplying = (
        row
        for row in parameters(config)
        if row.is_map
        or row.is_convolution
        or (row.name == "embedding" and config.logits_via_embedding)
    )
    length, windows = config.max_target_length, local_layers(config, config.base_num_decoder_layers)
    cycle = cycle_of(config)
    forms = cycle * (len(windows) // len(cycle))
    attended = of_states = 0
    for is_local, form in zip(windows, forms, strict=True):
        of_state = form.attention.state_operations(config)
        if of_state is not None:
            of_states += of_state
            continue
        twice_seen = form.attention.twice_seen(config, length, is_local)
        attended += twice_seen * sum(form.attention.widths(config, is_local))
    matrices = sum(active_size_of(row, config) for row in multiplying)
    return 6 * matrices + of_states + 3 * attended * config.base_num_query_heads
