"""Folders as TensorStore describes them (https://google.github.io/tensorstore/kvstore).

TensorStore has clients of its own for object stores, which do not read all variables that ours
read.
"""

from __future__ import annotations

import os

from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath


def key_value_store(folder: AnyPath) -> dict[str, object]:
    """Returns TensorStore's description of a folder, with the addresses that the environment gives
    to other clients.
    """
    if not isinstance(folder, RemotePath):
        return {"driver": "file", "path": f"{folder}/"}
    scheme, _, rest = str(folder).partition("://")
    bucket, _, path = rest.partition("/")
    if scheme == "gs":
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator.rstrip("/"))
            os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anonymous")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    store: dict[str, object] = {"driver": "s3", "bucket": bucket, "path": f"{path}/"}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        return store | {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return store | ({"aws_region": region} if region else {})
