"""The supported object stores. A new scheme needs a module here and a row in `STORES`."""

from __future__ import annotations

from typing import Any

from maxbatch.system.stores.amazon import Amazon
from maxbatch.system.stores.google import Google
from maxbatch.system.stores.store import ObjectStore, split

STORES: dict[str, ObjectStore[Any]] = {"gs": Google(), "s3": Amazon()}


def store_of(url: str) -> ObjectStore[Any]:
    """Returns the store of a URL, whose scheme must be in `STORES`."""
    return STORES[split(url)[0]]
