"""The batch stated by several foreign words together, in our keys.

A word states one quantity of the batch or the machine. Products connect the quantities, such as
samples of an update = replicas x samples of a replica, so two words often determine a third.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from maxbatch.around.words import look_up
from maxbatch.around.words.convert import Setting, read_number, text_of
from maxbatch.config.values import in_tokens

# a word of OLMo-core, which counts global_batch_size in tokens too
OF_OLMO = "rank_microbatch_size"
OF_NANOCHAT = ("device_batch_size", "total_batch_size")  # its words; the second one counts tokens
# In each, the first is the product of the other two.
_PRODUCTS = (
    ("devices", "hosts", "devices_of_host"),
    ("devices", "replicas", "devices_of_replica"),
    ("batch", "replicas", "samples_of_replica"),
    ("batch", "rows_of_pass", "passes"),
    ("batch", "hosts", "samples_of_host"),
    ("samples_of_replica", "rows", "passes"),
    ("rows_of_pass", "replicas", "rows"),
    ("rows", "rows_of_device", "devices_of_replica"),
    ("loaded", "batch", "expansion"),
    ("hosts", "loading_hosts", "expansion"),
    ("tokens", "batch", "length"),
    ("tokens_of_rows", "rows", "length"),
)
_WHOLE = (
    "devices", "hosts", "devices_of_host", "replicas", "batch", "rows_of_pass", "passes", "loaded", "loading_hosts",
)  # fmt: skip
_OF_KEY = {
    "per_device_batch_size": "rows_of_device", "gradient_accumulation_steps": "passes", "global_batch_size": "batch",
}  # fmt: skip
_OF_MACHINE = {
    "devices": ("number_of_devices", "num_devices", "number_of_gpus", "n_gpu", "n_gpus", "world_size", "size"),
    "hosts": ("num_hosts", "nnodes", "num_nodes", "nodes", "num_machines"),
    "devices_of_host": (
        "nprocs", "nproc_per_node", "local_world_size", "ngpus_per_node", "ngpu_per_node", "gpus_per_node",
        "n_gpus_per_node", "chips_per_vm", "devices", "gpus", "num_gpus",
    ),
    "replicas": ("num_replicas", "num_replicas_in_sync"),
}  # fmt: skip
_OF_BATCH = {
    "samples_of_replica": ("per_replica_batch_size", "per_replica"),
    "samples_of_host": (
        "batch_size_per_node", "per_node_batch_size", "samples_per_node", "samples_per_host", "images_per_node",
    ),
    "rows": (
        "micro_batch_size", "micro_batch", "microbatch_size", "micro", "micro_train_batch_size",
        "train_micro_batch_size",
    ),
    "rows_of_pass": ("micro_batch_size_to_train_on",),
    "loaded": ("global_batch_size_to_load", "global_batch_to_load"),
    "loading_hosts": ("num_loading_hosts",),
    "tokens": ("tokens_per_step", "tokens_per_batch", "num_tokens_per_train_step", "data_loader.global_batch_size"),
    "tokens_of_rows": ("num_tokens_per_microbatch_per_dp_rank", "rank_microbatch_size", "max_tokens"),
}  # fmt: skip
_QUANTITY = {
    word: quantity
    for table in (_OF_MACHINE, _OF_BATCH)
    for quantity, words in table.items()
    for word in words
}
# The same name as our key, but it counts rows per model replica; ours counts rows per device.
_OF_SAME = _OF_KEY | {"per_device_batch_size": "rows"}
_Facts = Iterable[tuple[str, Fraction]]
_Known = Mapping[str, Fraction]


class Together(NamedTuple):
    """The settings and the machine that follow from several words."""

    # our settings, by each word of a batch or a machine that they replace
    settings: Mapping[str, Mapping[str, str]]
    devices: int | None  # None: unknown
    hosts: int | None


def together(
    words: Mapping[str, str], known_texts: Mapping[str, str], setting: Setting
) -> Together | None:
    """Returns the batch and the machine that follow from words; None if the words contradict each
    other.

    Args:
      words: texts by word; words of neither a batch nor a machine are ignored.
      known_texts: texts of our keys stated beside them.
      setting: the config and the machine.
    """
    quantities: dict[str, tuple[str, Fraction]] = {}
    for word, text in words.items():
        is_tokens = word == OF_NANOCHAT[1] and OF_NANOCHAT[0] in words
        quantity, value = "tokens" if is_tokens else _quantity(word), read_number(text)
        if quantity and value and (quantity in _OF_MACHINE or not setting.is_of_prompts):
            quantities[word] = quantity, value
    if not quantities:
        return Together({}, setting.devices, setting.hosts)
    of_olmo = (
        read_number(known_texts.get("global_batch_size", "")) if OF_OLMO in quantities else None
    )
    if of_olmo:
        known_texts = {**known_texts, "global_batch_size": f"{text_of(of_olmo)}t"}
    facts = [*quantities.values(), *_facts(known_texts, setting)]
    known = _solved(facts)
    if known is not None and "devices_of_host" in known and "hosts" not in known:
        known = _solved([*known.items(), ("hosts", Fraction(1))])
    if (
        known is not None
        and {"loaded", "loading_hosts"} & known.keys()
        and "expansion" not in known
    ):
        known = _solved([*known.items(), *_as_configured(known, setting)])
    if known is None:
        return None
    settings_of = {word: _ours(quantity, known) for word, (quantity, _) in quantities.items()}
    settings = {word: texts for word, texts in settings_of.items() if texts is not None}
    if "length" in known:
        settings = _in_one_unit(
            settings, {word for word, (name, _) in quantities.items() if name == "tokens"}
        )
    if of_olmo and OF_OLMO in settings:
        settings[OF_OLMO] = {
            "global_batch_size": known_texts["global_batch_size"],
            **settings[OF_OLMO],
        }
    return Together(settings, _count(known, "devices"), _count(known, "hosts"))


def _in_one_unit(
    settings: Mapping[str, Mapping[str, str]], token_words: Collection[str]
) -> dict[str, Mapping[str, str]]:
    """Returns the settings with one text of the batch, in samples if a word states it so.

    Args:
      token_words: the words that state the batch in tokens.
    """
    key = "global_batch_size"
    batches = (
        texts[key] for word, texts in settings.items() if word not in token_words and key in texts
    )
    batch = next(batches, None)
    if batch is None:
        return dict(settings)
    return {
        word: {key: batch} if word in token_words else texts for word, texts in settings.items()
    }


def _quantity(word: str) -> str | None:
    row = look_up(word)
    same = _OF_SAME.get(row.keys[0]) if row and row.is_same else None
    return _QUANTITY.get(word, same)


def _facts(known_texts: Mapping[str, str], setting: Setting) -> Iterator[tuple[str, Fraction]]:
    """Yields quantities from the machine, the mesh, and our keys beside the words."""
    machine = {
        "devices": setting.devices,
        "hosts": setting.hosts,
        "devices_of_replica": setting.devices_of_replica,
    }
    yield from ((name, Fraction(count)) for name, count in machine.items() if count)
    if length := setting.slots_per_sample:
        yield "length", Fraction(length)
    if not setting.is_of_prompts:
        texts = ((quantity, known_texts.get(key, "")) for key, quantity in _OF_KEY.items())
        yield from ((quantity, value) for quantity, text in texts if (value := read_number(text)))
        if known_texts.get("global_batch_size", "").endswith("t") and (
            tokens := in_tokens(known_texts["global_batch_size"])
        ):
            yield "tokens", tokens


def _as_configured(known: _Known, setting: Setting) -> Iterator[tuple[str, Fraction]]:
    """Yields quantities of the config's batch if the words state none."""
    if "batch" not in known:
        batch = setting.number("global_batch_size")
        quantities = {"batch": batch} if batch else {
            quantity: setting.number(key) for key, quantity in _OF_KEY.items() if quantity != "batch"
        }  # fmt: skip
        yield from (
            (quantity, value)
            for quantity, value in quantities.items()
            if value and quantity not in known
        )


def _solved(facts: _Facts) -> _Known | None:
    """Returns the facts and all derived quantities; None if two contradict or a count is not
    whole.
    """
    known: dict[str, Fraction] = {}
    facts_to_add = list(facts)
    while facts_to_add:
        for name, value in facts_to_add:
            if known.setdefault(name, value) != value or (
                name in _WHOLE and value.denominator != 1
            ):
                return None
        facts_to_add = [
            fact
            for product in _PRODUCTS
            for fact in _follows(product, known)
            if known.get(fact[0]) != fact[1]
        ]
    return known


def _follows(product: tuple[str, str, str], known: _Known) -> _Facts:
    whole, factor, other = product
    if factor in known and other in known:
        yield whole, known[factor] * known[other]
    for part, rest in ((factor, other), (other, factor)):
        if whole in known and rest in known:
            yield part, known[whole] / known[rest]


def _ours(quantity: str, known: _Known) -> Mapping[str, str] | None:
    """Returns our settings for a quantity; None if a fact is missing or no setting gives it."""
    if quantity in _OF_MACHINE:
        return {}
    if quantity in ("loaded", "loading_hosts"):
        factor = known.get("expansion")
        is_whole = factor is not None and factor.denominator == 1
        return {"expansion_factor_real_data": text_of(factor)} if factor and is_whole else None
    if quantity == "tokens":
        return {"global_batch_size": f"{text_of(known[quantity])}t"}
    key, needed = {
        "rows": ("per_device_batch_size", "rows_of_device"),
        "rows_of_pass": ("per_device_batch_size", "rows_of_device"),
        "tokens_of_rows": ("per_device_batch_size", "rows_of_device"),
        "passes": ("gradient_accumulation_steps", "passes"),
    }.get(quantity, ("global_batch_size", "batch"))
    return {key: text_of(known[needed])} if needed in known else None


def _count(known: _Known, name: str) -> int | None:
    return int(known[name]) if name in known else None
