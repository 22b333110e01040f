"""Facts that all hosts of a run must share, compared by name before anything depends on them."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax

from maxbatch.config.values import first_of, shown
from maxbatch.parallel.hosts import gather
from maxbatch.system.errors import ConfigError

Facts = Mapping[str, str]  # by name

_MOST_NAMED, _MOST_HOSTS, _LONGEST = 8, 4, 40


def check_agreed(facts: Facts, remedy: str, where: str = "") -> None:
    """Checks that the facts of all hosts are equal; all hosts call it.

    Hosts exchange a hash first, and the facts themselves only where it differs.

    Args:
      remedy: ends the message.
      where: begins it.

    Raises:
      ConfigError: some differ; the message names each with its values and their hosts.
    """
    if jax.process_count() == 1:
        return
    if len(set(gather(_hash(facts)))) > 1 and (texts := differences(gather(dict(facts)))):
        raise ConfigError(f"{where}the hosts differ: {first_of(texts, _MOST_NAMED, ';')}; {remedy}")


def differences(facts: Sequence[Facts]) -> list[str]:
    """Returns a text for each fact that differs between hosts, such as `steps: 4 on host 0 | 8 on
    hosts 1, 2`.

    Args:
      facts: of each host, by its index.
    """
    names = dict.fromkeys(name for facts_of_host in facts for name in facts_of_host)
    return [text for name in names if (text := _difference(name, facts))]


def _difference(name: str, facts: Sequence[Facts]) -> str | None:
    hosts: dict[str, list[int]] = defaultdict(list)
    for host, facts_of_host in enumerate(facts):
        hosts[facts_of_host.get(name, "none")].append(host)
    if len(hosts) <= 1:
        return None
    texts = _shortened(list(hosts))
    return f"{name}: " + " | ".join(
        f"{texts[value]} on {_named(numbers)}" for value, numbers in hosts.items()
    )


def _shortened(values: Sequence[str]) -> dict[str, str]:
    """Returns values cut to a length at which they still differ."""
    same = next(
        (i for i, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), 0
    )
    begin = max(0, same - _LONGEST // 2) if max(map(len, values)) > _LONGEST else 0
    return {
        value: repr(value)
        if not value
        else ("..." if begin else "") + shown(value[begin:], _LONGEST)
        for value in values
    }


def _named(hosts: Sequence[int]) -> str:
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    return f"hosts {first_of([str(host) for host in hosts], _MOST_HOSTS)}"


def _hash(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
