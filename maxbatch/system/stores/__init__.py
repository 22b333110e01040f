"""The object stores that paths may name. A new scheme is a module beside these, and its row in `STORES`."""

from __future__ import annotations

from maxbatch.system.stores.amazon import Amazon
from maxbatch.system.stores.google import Google
from maxbatch.system.stores.store import ObjectStore, split

STORES: dict[str, ObjectStore] = {"gs": Google(), "s3": Amazon()}


def store_of(url: str) -> ObjectStore:
    """Returns the store of a URL whose scheme is in `STORES`."""
    return STORES[split(url)[0]]
