"""The keys of the config: the type and rule of each, and how a value is read from its text.

A key's type follows from its default in base.yml. The tables below add what a default cannot tell. Scalars
are read by their key's type and never by YAML's guess, for which `10:13` is 613 and `3e-4` a string.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from fractions import Fraction

from maxbatch.system.errors import ConfigError

Value = bool | int | float | Fraction | str | None

CHOICES: dict[str, tuple[str, ...]] = {
    "learning_rate_schedule": ("cosine", "wsd", "constant"),
    "learning_rate_scaling": ("none", "linear", "sqrt"),
    "adam_scaling": ("none", "sde"),
    "opt_type": ("adamw", "lion", "adafactor", "muon", "sgd"),
    "dtype": ("float32", "bfloat16"),
    "weight_dtype": ("float32", "bfloat16"),
    "remat_policy": ("none", "minimal", "full"),
    "attention": ("auto", "dot_product", "cudnn", "splash"),
    "dataset_type": (
        "python_stdlib",
        "synthetic",
        "text",
        "jsonl",
        "parquet",
        "arrayrecord",
        "tokens",
        "arithmetic",
    ),
    "record_format": ("text", "example"),
    "packing_strategy": ("concatenate", "best_fit"),
    "tokenizer_type": ("byte", "huggingface", "sentencepiece"),
    "loss_algo": ("grpo", "gspo-token"),
    "loss_agg_mode": ("token-mean", "sequence-mean", "sequence-mean-token-mean"),
}

# Keys that a config file may state as a list: [a, b] is "a;b", [{path: a, weight: 0.7}, ...] is "a,0.7;...".
LISTS = frozenset({"dataset_path", "eval_dataset_path"})

NULLABLE = frozenset({
    "steps", "train_samples", "train_tokens", "num_epochs",
    "gradient_accumulation_steps", "global_batch_size", "batch_size_schedule",
    "eval_per_device_batch_size", "reference_batch_size", "max_num_checkpoints_to_keep",
    "peak_tflops_per_device", "batch_size", "epsilon_high",
})  # fmt: skip

# Numbers that enter batch arithmetic: decimals and fractions ("1/3") mean exactly what they say.
EXACT = frozenset({
    "per_device_batch_size", "per_device_batch_size_start", "per_device_batch_size_increment",
    "eval_per_device_batch_size", "expansion_factor_real_data", "num_epochs",
    "trainer_devices_fraction", "sampler_devices_fraction",
})  # fmt: skip
# Whole numbers of data: suffixes K, M, B, and decimals where the product is whole (1.5M).
QUANTITIES = frozenset({"train_samples", "train_tokens", "global_rampup_samples", "synthetic_samples"})
WHOLE = frozenset({"global_batch_size", "reference_batch_size", "batch_size"})
REAL = frozenset({"eval_fraction", "peak_tflops_per_device", "rope_max_timescale", "epsilon_high"})


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The interval a number must lie in; `above` and `below` exclude their end."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: float | None = None  # one value outside that is allowed as well

    def broken(self, value: int | float | Fraction) -> tuple[str, float] | None:
        """Return the rule that value breaks and the nearest value that does not, or None."""
        if value == self.also:
            return None
        or_else = "" if self.also is None else f" (or {self.also:g})"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self.at_least:g}{or_else}", self.at_least
        if self.at_most is not None and value > self.at_most:
            return f"at most {self.at_most:g}{or_else}", self.at_most
        if self.above is not None and value <= self.above:
            return f"greater than {self.above:g}{or_else}", self._inside(self.above, 1)
        if self.below is not None and value >= self.below:
            return f"less than {self.below:g}{or_else}", self._inside(self.below, -1)
        return None

    def _inside(self, end: float, direction: int) -> float:
        other = self.below if direction > 0 else self.above
        other = self.at_least if other is None and direction < 0 else other
        return end + direction if other is None or abs(other - end) > 1 else (end + other) / 2


_POSITIVE, _COUNT, _FROM_ZERO = Bounds(above=0), Bounds(at_least=1), Bounds(at_least=0)
_SHARE, _SEED = Bounds(at_least=0, at_most=1), Bounds(at_least=0, at_most=2**32 - 1)
_ROWS, _SAMPLES = Bounds(above=0, at_most=2**31), Bounds(at_least=1, at_most=2**40)
_COUNT_OR_OFF = Bounds(at_least=1, also=-1)

BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("steps", "train_samples", "train_tokens"), _COUNT),
    **dict.fromkeys(("per_device_batch_size", "per_device_batch_size_start"), _ROWS),
    "eval_per_device_batch_size": _ROWS,
    **dict.fromkeys(("num_epochs", "learning_rate", "adam_eps", "rope_max_timescale"), _POSITIVE),
    **dict.fromkeys(("normalization_layer_epsilon", "peak_tflops_per_device"), _POSITIVE),
    **dict.fromkeys(("gradient_accumulation_steps", "global_batch_size"), _SAMPLES),
    "reference_batch_size": _SAMPLES,
    **dict.fromkeys(("global_rampup_samples", "max_consecutive_skips", "synthetic_samples"), _COUNT),
    **dict.fromkeys(("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim"), _COUNT),
    **dict.fromkeys(("base_num_decoder_layers", "vocab_size", "grain_prefetch_buffer_size"), _COUNT),
    "num_pipeline_repeats": _COUNT,
    **dict.fromkeys(("checkpoint_period", "max_num_checkpoints_to_keep", "log_period"), _COUNT),
    **dict.fromkeys(("warmup_steps_fraction", "wsd_decay_steps_fraction"), _SHARE),
    "learning_rate_final_fraction": _SHARE,
    **dict.fromkeys(("adam_b1", "adam_b2", "eval_fraction"), Bounds(at_least=0, below=1)),
    **dict.fromkeys(("adam_weight_decay", "gradient_clipping_threshold", "grain_worker_count"), _FROM_ZERO),
    **dict.fromkeys(("init_weights_seed", "data_shuffle_seed"), _SEED),
    **dict.fromkeys(("num_pipeline_microbatches", "eval_interval", "eval_steps"), _COUNT_OR_OFF),
    **dict.fromkeys(("batch_size", "num_generations", "eval_num_generations"), _COUNT),
    **dict.fromkeys(("num_iterations", "reward_worker_count"), _COUNT),
    **dict.fromkeys(("micro_batch_size", "train_micro_batch_size", "rollout_micro_batch_size"), _COUNT_OR_OFF),
    **dict.fromkeys(("grpo_beta", "decode_sampling_top_k", "warm_start_steps"), _FROM_ZERO),
    "grpo_epsilon": Bounds(above=0, below=1),
    **dict.fromkeys(("epsilon_high", "decode_sampling_temperature", "reward_timeout_s"), _POSITIVE),
    **dict.fromkeys(
        ("decode_sampling_nucleus_p", "trainer_devices_fraction", "sampler_devices_fraction"),
        Bounds(above=0, at_most=1),
    ),
    "sampler_seed": _SEED,
    "warm_start_learning_rate": _POSITIVE,
    "max_prefill_predict_length": _COUNT,
    "max_target_length": Bounds(at_least=2),
    "head_dim": Bounds(at_least=2),
    **{f"{net}_{axis}_parallelism": _COUNT_OR_OFF
       for net in ("ici", "dcn") for axis in ("data", "fsdp", "tensor", "context", "pipeline")},
}  # fmt: skip

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_DECIMAL = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
NULLS = ("", "~", "null", "none")
_LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Key:
    """One config key: its name, how its text is read, whether it may be null, and the text of its default."""

    name: str
    kind: str  # bool, choice, exact, int, quantity, real or text
    nullable: bool
    default: str

    @classmethod
    def from_default(cls, name: str, text: str, plain: bool) -> Key:
        """Derive the key from its default's text in base.yml (`plain`: written without quotes)."""
        return cls(name, _kind(name, text, plain), name in NULLABLE, text)

    def read(self, text: str, plain: bool = True) -> Value:
        """Return the value that text means for this key, or raise ConfigError."""
        if self.kind != "text":
            text = text.strip()
        is_null = plain and text.strip().lower() in NULLS
        if is_null and self.nullable:
            return None
        if self.kind == "text":
            if not is_null:
                return text
            # An empty text is the null of a text key; "none" without quotes is a word.
            return text if text.strip().lower() == "none" else ""
        if self.kind == "choice":
            return self._choice(text)
        if self.kind == "bool":
            return self._bool(text)
        readers = {"int": self._int, "quantity": self._quantity, "exact": self._exact, "real": self._real}
        value = readers[self.kind](text)
        self._check_bounds(text, value)
        return value

    def write(self, value: Value) -> str:
        """Return the text that `read` turns into value again."""
        if value is None:
            return "null"
        if isinstance(value, bool):
            return str(value).lower()
        return str(value)

    def fault(self, text: str, rule: str, nearest: object = None) -> ConfigError:
        """Return the error for a value: key, value, rule, and the nearest value that works."""
        works = "" if nearest is None else f"; works: {self.name}={nearest}"
        return ConfigError(f"{self.name}={shown(text)}: must be {rule}{works}")

    def _choice(self, text: str) -> str:
        choices = CHOICES[self.name]
        if text in choices:
            return text
        raise self.fault(text, f"one of {', '.join(choices)}", nearest_name(text, choices) or choices[0])

    def _bool(self, text: str) -> bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        nearest = "true" if text.lower() in ("1", "yes", "on", "y", "t") else "false"
        raise self.fault(text, "true or false", nearest)

    def _int(self, text: str) -> int:
        number = _decimal(text)
        if number is not None and number.denominator == 1 and "." not in text:
            return int(number)
        raise self.fault(text, self._or_null("a whole number"), self._near(number))

    def _quantity(self, text: str) -> int:
        suffix = text[-1:].upper() if text[-1:].upper() in ("K", "M", "B") else ""
        number = _decimal(text[: len(text) - len(suffix)].strip())
        value = None if number is None else number * _SUFFIXES[suffix]
        if value is None or value.denominator != 1 or abs(value) > _LARGEST:
            trillions = _decimal(text[:-1].strip()) if text[-1:].upper() == "T" else None
            nearest = self._near(value) if trillions is None else f"{plain_number(trillions * 1000)}B"
            raise self.fault(text, self._or_null("a whole number (suffixes K, M, B)"), nearest)
        return int(value)

    def _exact(self, text: str) -> int | float | Fraction:
        top, slash, bottom = text.partition("/")
        number, divisor = _decimal(top.strip()), _decimal(bottom.strip()) if slash else Fraction(1)
        if number is None or not divisor or abs(number / divisor) > _LARGEST:
            raise self.fault(text, self._or_null("a number or a fraction such as 1/3"), self._near(None))
        return plain_number(number / divisor)

    def _real(self, text: str) -> float:
        number = _decimal(text)
        if number is None or not math.isfinite(float(text.replace("_", ""))):
            raise self.fault(text, self._or_null("a finite number"), self._near(None))
        return float(text.replace("_", ""))

    def _or_null(self, rule: str) -> str:
        return f"{rule} or null" if self.nullable else rule

    def _near(self, number: Fraction | None) -> Value:
        """Return a value near number that the key takes; its default where there is no number."""
        if number is None:
            return self.default
        guess = min(max(round(number), -_LARGEST), _LARGEST)
        bounds = BOUNDS.get(self.name)
        broken = bounds.broken(guess) if bounds else None
        return plain_number(guess if broken is None else broken[1])

    def _check_bounds(self, text: str, value: int | float | Fraction) -> None:
        bounds = BOUNDS.get(self.name)
        broken = bounds.broken(value) if bounds else None
        if broken is not None:
            rule, end = broken
            default = _decimal(self.default)
            is_nearer = default is not None and abs(default - exact(value)) <= abs(exact(end) - exact(value))
            raise self.fault(text, self._or_null(rule), self.default if is_nearer else plain_number(end))
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise self.fault(text, f"at most {_LARGEST}", self._near(None))


def _kind(name: str, text: str, plain: bool) -> str:
    if name in CHOICES:
        return "choice"
    for kind, names in (("exact", EXACT), ("quantity", QUANTITIES), ("int", WHOLE), ("real", REAL)):
        if name in names:
            return kind
    if not plain:
        return "text"
    if text in ("true", "false"):
        return "bool"
    if _INTEGER.fullmatch(text):
        return "int"
    return "real" if _decimal(text) is not None else "text"


def _decimal(text: str) -> Fraction | None:
    """Return the exact value of a decimal number, or None where text is none; nan and infinities are none."""
    if len(text) > 2000 or not _DECIMAL.fullmatch(text):
        return None
    return Fraction(text.replace("_", ""))


def exact(value: int | float | Fraction) -> Fraction:
    """Return a config number as the fraction it says: the float 0.1 is one tenth."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: int | float | Fraction) -> int | float | Fraction:
    """Return value, exactly, as an int, else as the float that prints it, else as a Fraction."""
    fraction = exact(value)
    if fraction.denominator == 1:
        return int(fraction)
    return float(fraction) if exact(float(fraction)) == fraction else fraction


def nearest_name(name: str, known: Iterable[str], least_like: float = 0.5) -> str | None:
    """Return the known name that is most like name, or None where none is so much like it (0 to 1)."""
    found = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=least_like)
    return found[0] if found else None


def shown(text: str, most: int = 80) -> str:
    """Return user input on one line and of at most so many characters, for a message."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."
