"""The supported object stores. A new scheme needs a module here and a row in `STORES`."""

from __future__ import annotations

from typing import Any

from maxbatch.system.storage.stores.amazon import Amazon
from maxbatch.system.storage.stores.google import Google
from maxbatch.system.storage.stores.store import ObjectStore

STORES: dict[str, ObjectStore[Any]] = {"gs": Google(), "s3": Amazon()}
