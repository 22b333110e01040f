"""Batches as papers and projects print them, as keys to paste: a late switch, and nanochat's
D^0.383.

python examples/batch_schedules.py
"""

from __future__ import annotations

import math
from fractions import Fraction

Keys = dict[str, str]


def late_switch(samples: int, small: int, large: int, share: Fraction) -> Keys:
    """Returns the keys of a run that trains on small batches for a share of its samples, and on
    large ones after.

    Wang et al. 2026 (arXiv 2602.14208): on hard tasks the small batch serves most of the run, and
    the switch is late.

    Args:
      samples: of the run.
      small: samples of an update before the switch.
      large: the same after it.
      share: of the run's samples before the switch, between 0 and 1.
    """
    return {
        "train_samples": f"{samples}",
        "batch_size_schedule": f"0:{small} {math.ceil(share * samples)}:{large}",
    }


def nanochat(tokens: int, reference_tokens: int, length: int, reference_batch: int = 2**19) -> Keys:
    """Returns the keys of a run whose batch grows with its length D as D^0.383, rounded to a power
    of two.

    The exponent is that of Bergsma et al. 2025 (arXiv 2505.13738); reference, rounding and the root
    of the rate are those of nanochat's `scripts/base_train.py`
    (https://github.com/karpathy/nanochat).

    Args:
      tokens: D, of the run.
      reference_tokens: of a run for which the reference batch and the rate were tuned.
      length: tokens of a sample, at most the batch; a power of two.
      reference_batch: tokens of an update of that run.
    """
    exponent = round(math.log2(reference_batch) + 0.383 * math.log2(tokens / reference_tokens))
    return {
        "max_target_length": f"{length}",
        "train_tokens": f"{tokens}",
        "global_batch_size": f"{2**exponent // length}",
        "learning_rate_scaling": "sqrt",
        "reference_batch_size": f"{reference_batch // length}",
    }


def command(keys: Keys) -> str:
    """Returns the command that plans a run of such keys."""
    words = (f'{name}="{text}"' if " " in text else f"{name}={text}" for name, text in keys.items())
    return " ".join(("maxbatch plan", *words))


def main() -> list[str]:
    """Prints one command of each."""
    found = [
        command(late_switch(100_000, 64, 256, Fraction(3, 4))),
        command(nanochat(4_000_000_000, 1_000_000_000, 2048)),
    ]
    print("\n".join(found))
    return found


if __name__ == "__main__":
    main()
