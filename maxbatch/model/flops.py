"""The floating-point operations of a model."""

from __future__ import annotations

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import cycle_of, local_layers
from maxbatch.families.matrices import active_size_of, attention_widths, parameters


def model_flops_per_token(config: DecoderConfig) -> int:
    """Returns the floating-point operations of training per token, forward and backward, without
    recomputation.

    They are 6 per parameter that multiplies a token (2 forward, 4 backward; the embedding lookup
    multiplies nothing, and of a layer's experts only those that the token goes to), and 12 * H * h
    for attention per layer and token that is seen (h is the mean width of a key and a value, where
    they differ): L / 2 of them, because it is causal, and in a layer with a window of W < L tokens
    W - W * W / 2L, since the first W tokens of a row see fewer; in chunks of W it is W / 2. A layer
    with a state has what its form states (`AttentionForm.state_operations`).

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
    chunk, cycle, attended = config.chunk_attn_window_size, cycle_of(config), 0
    forms = cycle * (len(windows) // len(cycle))
    of_states = 0
    for is_local, form in zip(windows, forms, strict=True):
        of_state = form.attention.state_operations(config)
        if of_state is not None:
            of_states += of_state
            continue
        seen = min(chunk or config.sliding_window_size, length) if is_local else length
        twice_seen = seen if chunk else 2 * seen - seen * seen // length
        attended += twice_seen * sum(attention_widths(config, is_local))
    matrices = sum(active_size_of(row, config) for row in multiplying)
    return 6 * matrices + of_states + 3 * attended * config.base_num_query_heads
