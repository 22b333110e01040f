"""The form of MaxText's layers: its decoder blocks, activations and RoPE, where their values differ from ours."""

from __future__ import annotations

import re

from maxbatch.commands.import_config.translation import Translation
from maxbatch.config.families import FAMILIES
from maxbatch.config.sections import KEYS

_OF_IMAGES = ("vision_encoder_block", "image_placeholder", "freeze_vision_encoder_params", "vision_output_dim_for_vit")
_LLAMA_BLOCKS = ("llama2", "llama3", "default")
# Blocks whose windows are a pattern of the layers that attention_type does not state there.
_PATTERNS = {name: FAMILIES[name].attention_type for name in ("gemma2", "gemma3")}
_NORMALISING = tuple(name for name, family in FAMILIES.items() if family.always_normalises)
_POST_NORMS = ("use_post_attn_norm", "use_post_ffw_norm")
_YARN_DEFAULTS = {
    "rope_factor": "40", "beta_fast": "32", "beta_slow": "1", "original_max_position_embeddings": "4096",
    "rope_truncate": "true", "rope_attention_scaling": "false",
}  # fmt: skip
# Llama 3.1's RoPE, with numbers from MaxText's code.
_LLAMA3_ROPE = {
    "rope_type": "llama3.1", "rope_factor": "8", "rope_low_freq_factor": "1", "rope_high_freq_factor": "4",
    "original_max_position_embeddings": "8192",
}  # fmt: skip
_ACTIVATIONS = next(key.choices for key in KEYS if key.name == "mlp_activations")
# Where its model of a name is another one than our preset.
PRESET_DIFFERENCES = {
    "gemma2-2b": {"vocab_size": "256128"},
    "gemma2-9b": {"vocab_size": "256128"},
    "gemma3-4b": {"vocab_size": "262144"},
    "mixtral-8x7b": {"load_balance_loss_weight": "0"},
    "mixtral-8x22b": {"load_balance_loss_weight": "0", "vocab_size": "32768"},
    "qwen3-30b-a3b": {
        "load_balance_loss_weight": "0",
        "load_balance_scope": "sequence",
        "rope_max_timescale": "10000000",
    },
    "deepseek3-671b": {
        "load_balance_loss_weight": "0",
        "routed_bias_update_rate": "0",
        "n_routing_groups": "-1",
        "topk_routing_group": "-1",
    },
    "qwen3-235b-a22b": {"load_balance_scope": "sequence", "rope_max_timescale": "5000000"},
    "mistral-7b": {"attention_type": "global", "sliding_window_size": "0", "rope_max_timescale": "1000000"},
}
# The experts of a token in its models of a name.
MODEL_CHOICES = {
    "gpt-oss-20b": 4, "gpt-oss-120b": 4, "mixtral-8x7b": 2, "mixtral-8x22b": 2, "qwen3-30b-a3b": 8,
    "qwen3-235b-a22b": 8, "deepseek3-671b": 8,
}  # fmt: skip


def translate_form(t: Translation, is_preset: bool) -> None:
    """Takes the words of a layer's form; the rest of a block comes from our preset."""
    block = t.text("decoder_block")
    _family(t, block)
    if block in _PATTERNS:
        _gemma(t, block, is_preset)
    elif block in _LLAMA_BLOCKS:
        t.ignore("decoder_block", "llama's block is the default")
    elif block == "gpt_oss":
        _gpt_oss(t)
    elif block == "deepseek":
        _deepseek(t)
    elif block in _NORMALISING:
        t.map("decoder_block", f"{block}'s block normalises the weights of experts", decoder_block=block)
        t.settings["norm_topk_prob"] = "true"
        if "norm_topk_prob" in t:
            t.ignore("norm_topk_prob", f"{block}'s block always normalises")
    _tied_logits(t, block)
    _activations(t)
    _rope(t)
    if t.text("attention_type") == "global":
        t.ignore("attention_type", "global is the default")


def _family(t: Translation, block: str) -> None:
    """Refuses models of other families by their names."""
    if "decoder_block" in t and block not in (*_LLAMA_BLOCKS, *FAMILIES):
        t.refuse("decoder_block", f"the family {block}; there are {', '.join(FAMILIES)}", is_essential=True)
    if t.is_true("use_multimodal"):
        t.refuse("use_multimodal", "text only", is_essential=True)
    else:
        for word in t.left():
            if word.endswith("_for_vit") or word in _OF_IMAGES:
                t.ignore(word, "use_multimodal=false: text alone is read")


def _gpt_oss(t: Translation) -> None:
    """Takes the form that gpt_oss's block always has here, and that its file has to state there."""
    pattern = FAMILIES["gpt_oss"].attention_type
    t.map("decoder_block", decoder_block="gpt_oss", attention_type=pattern, norm_topk_prob="true")
    t.ignore("attention_type", "gpt_oss's block has a pattern of its own")
    t.ignore("norm_topk_prob", "gpt_oss's block always normalises")
    for word in ("attention_sink", "attention_bias", "mlp_bias", "routed_bias"):
        if t.is_true(word):
            t.ignore(word, "gpt_oss's block has it")
        else:
            t.refuse(word, "true, as gpt_oss's block has it", is_essential=True)
    t.settings |= {"attention_bias": "true", "attention_out_bias": "true"}
    if _activation(t) == "sigmoid,linear":
        t.ignore("mlp_activations", "gpt_oss's block has them")
    for word, has in (
        ("mlp_activations_limit", FAMILIES["gpt_oss"].expert_limit),
        ("inhomogeneous_layer_cycle_interval", 2),
    ):
        if t.number(word) == has:
            t.ignore(word, "gpt_oss's block has it")
        else:
            t.refuse(word, f"{has:g}, as gpt_oss's block has it", is_essential=True)


def _deepseek(t: Translation) -> None:
    """Takes the form of DeepSeek's block: its other words are keys here too."""
    t.map("decoder_block", decoder_block="deepseek")
    if t.text("attention_type") == "mla":
        t.ignore("attention_type", "deepseek's block has latent attention")
    else:
        t.refuse("attention_type", "mla, as deepseek's block has it", is_essential=True)
    if t.text("rope_interleave", "true").lower() == "true":
        t.ignore("rope_interleave", "deepseek's block rotates pairs of neighbours")
    else:
        t.refuse("rope_interleave", "true, as deepseek's block has it", is_essential=True)
    if t.text("routed_score_func") == "sigmoid":
        why = "its weights are divided by their sum there"
        t.map("routed_score_func", why, routed_score_func="sigmoid", norm_topk_prob="true")
        t.ignore("norm_topk_prob", "sigmoid scores are always divided by their sum")
    stated, original = (t.number(word) for word in ("max_position_embeddings", "original_max_position_embeddings"))
    if stated is not None and stated <= (original or 4096):
        t.map("mscale", "scores do not grow where max_position_embeddings is the original length", mscale="0")


def _gemma(t: Translation, block: str, is_preset: bool) -> None:
    t.map("decoder_block", decoder_block=block, attention_type=_PATTERNS[block])
    if FAMILIES[block].has_qk_norm:
        t.settings["use_qk_norm"] = "true"
        if "use_qk_norm" in t:
            t.ignore("use_qk_norm", f"{block}'s block has it")
    elif not is_preset or "base_num_decoder_layers" in t:
        _double_layers(t)
    if "attention_type" in t:
        t.ignore("attention_type", f"{block}'s block has a pattern of its own")
    for word in _POST_NORMS:
        if t.is_true(word):
            t.ignore(word, f"{block}'s block has it")
        elif word in t or not is_preset:
            t.refuse(word, f"true, as {block}'s block has it")


def _double_layers(t: Translation) -> None:
    stated = t.number("base_num_decoder_layers")
    pairs = float(t.settings.get("base_num_decoder_layers", "nan")) if stated is None else stated
    if pairs.is_integer():  # the table of words refuses others
        why = "a layer there is two here, local and global"
        t.map("base_num_decoder_layers", why, base_num_decoder_layers=str(2 * int(pairs)))


def _tied_logits(t: Translation, block: str) -> None:
    """Takes the division of logits by sqrt(base_emb_dim), which MaxText makes by default where embeddings are tied."""
    word = "normalize_embedding_logits"
    is_tied = t.is_true("logits_via_embedding")
    if word not in t:
        if is_tied and block not in _PATTERNS:
            why = f"with {word}, its default, MaxText also divides the logits by sqrt(base_emb_dim); here they are not"
            t.map("logits_via_embedding", why, logits_via_embedding="true")
    elif not is_tied:
        t.ignore(word, "it is of embeddings that are tied")
    elif block in _PATTERNS:
        t.ignore(word, f"{block}'s embedding is scaled by as much")
    elif t.is_true(word):
        t.refuse(word, "false: logits are not divided here")
    else:
        t.ignore(word, "logits are not divided here")


def _activations(t: Translation) -> None:
    if "mlp_activations" not in t or not t.is_left("mlp_activations"):
        return
    stated = _activation(t)
    if stated == "silu,linear":
        t.ignore("mlp_activations", "the gated MLP of llama is the default")
    elif stated in _ACTIVATIONS:
        t.map("mlp_activations", mlp_activations=stated)
    else:
        t.refuse("mlp_activations", f"one of {' | '.join(_ACTIVATIONS)}", is_essential=True)


def _activation(t: Translation) -> str:
    return ",".join(re.findall(r"\w+", t.text("mlp_activations")))


def _rope(t: Translation) -> None:
    kind = t.text("rope_type", "default")
    is_scaled = t.text("rope_use_scale", "true").lower() != "false"
    if kind == "llama3.1" and is_scaled:
        t.map("rope_type", **_LLAMA3_ROPE)
    elif "rope_type" in t and kind in ("default", "llama3.1"):
        t.ignore("rope_type", "RoPE that is not scaled is the default")
    elif kind == "yarn":
        _yarn(t)
    elif "rope_type" in t:
        t.refuse("rope_type", "default, llama3.1 or yarn", is_essential=True)
    if "rope_use_scale" in t:
        t.ignore("rope_use_scale", "it is of rope_type llama3.1, which is mapped")
    for word in _YARN_DEFAULTS:
        if word in t and t.is_left(word):
            t.ignore(word, "it is of rope_type yarn")
    factor = t.number("rope_linear_scaling_factor")
    if factor is not None and factor > 1:
        t.map("rope_linear_scaling_factor", rope_type="linear", rope_factor=t.text("rope_linear_scaling_factor"))
    if t.number("rope_min_timescale") == 1:
        t.ignore("rope_min_timescale", "1 is the default")


def _yarn(t: Translation) -> None:
    t.map("rope_type", rope_type="yarn")
    for word, default in _YARN_DEFAULTS.items():
        if word != "rope_attention_scaling":
            t.settings[word] = default
            t.map(word, **{word: t.text(word, default)})
        elif t.is_true(word):
            t.ignore(word, "0.1 ln(rope_factor) + 1 is the default")
        else:
            t.map(word, "its default scales nothing", rope_attention_factor="1")
