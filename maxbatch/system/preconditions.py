"""Reads and writes of objects that depend on their version: GCS's generation, S3's ETag.

fsspec has no words for them beyond "create", so they are requests of each client.
"""

from __future__ import annotations

import json
import secrets
from typing import Any
from urllib.parse import quote

from maxbatch.system.object_stores import chain, gcs_object, split, status_of


def read(file_system: Any, url: str) -> tuple[bytes, str]:
    """Returns the content of an object and its version, by two requests that agree."""
    scheme, bucket, name = split(url)
    if scheme == "gs":
        while True:
            version = _generation(file_system, bucket, name)
            content = file_system.cat_file(url)
            if _generation(file_system, bucket, name) == version:
                return content, version
    answer = file_system.call_s3("get_object", Bucket=bucket, Key=name)
    from fsspec.asyn import sync

    return sync(file_system.loop, answer["Body"].read), answer["ETag"]


def version(file_system: Any, url: str) -> str | None:
    """Returns the version of an object, None if there is none."""
    scheme, bucket, name = split(url)
    try:
        if scheme == "gs":
            return _generation(file_system, bucket, name)
        return str(file_system.call_s3("head_object", Bucket=bucket, Key=name)["ETag"])
    except FileNotFoundError:
        return None


def write(file_system: Any, url: str, data: bytes, version: str | None) -> str | None:
    """Writes an object that has a version, or that is not there (None); returns its new version, None if it lost."""
    scheme, bucket, name = split(url)
    try:
        if scheme == "gs":
            return _upload(file_system, bucket, name, data, version or "0")
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        answer = file_system.call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)
        return str(answer["ETag"])
    except FileNotFoundError:
        if version is None:
            raise  # there is no bucket
        return None
    except Exception as error:
        if has_lost(error):
            return None
        raise


def remove(file_system: Any, url: str, version: str) -> bool:
    """Removes an object that has a version; returns whether it did."""
    scheme, bucket, name = split(url)
    try:
        if scheme == "gs":
            file_system.call("DELETE", gcs_object(bucket, name), ifGenerationMatch=version)
            return True
        if file_system.call_s3("head_object", Bucket=bucket, Key=name)["ETag"] != version:
            return False
        _delete_from_s3(file_system, {"Bucket": bucket, "Key": name}, version)
        return True
    except FileNotFoundError:
        return False
    except Exception as error:
        if has_lost(error):
            return False
        raise


def _delete_from_s3(file_system: Any, where: dict[str, str], version: str) -> None:
    try:
        file_system.call_s3("delete_object", **where, IfMatch=version)
    except Exception as error:
        if not any(status_of(one) == 501 for one in chain(error)):
            raise
        file_system.call_s3("delete_object", **where)  # not every S3 knows conditional deletes


def _generation(file_system: Any, bucket: str, name: str) -> str:
    return str(file_system.call("GET", gcs_object(bucket, name), json_out=True)["generation"])


def _upload(file_system: Any, bucket: str, name: str, data: bytes, version: str) -> str:
    service = file_system.base.removesuffix("/storage/v1/")
    path, mark = f"{service}/upload/storage/v1/b/{quote(bucket)}/o", secrets.token_hex(16)
    named = f"--{mark}\nContent-Type: application/json\n\n{json.dumps({'name': name})}\n"
    begin = f"{named}--{mark}\nContent-Type: application/octet-stream\n\n"
    body = begin.encode() + data + f"\n--{mark}--".encode()  # in parts, since an empty body is taken for none
    headers = {"Content-Type": f'multipart/related; boundary="{mark}"'}
    answer = file_system.call(
        "POST", path, uploadType="multipart", ifGenerationMatch=version, headers=headers, data=body, json_out=True
    )
    return str(answer["generation"])


def has_lost(error: BaseException) -> bool:
    """Returns whether a store says that the precondition does not hold, or that a rival is just writing."""
    return isinstance(error, FileExistsError) or any(status_of(one) in (409, 412) for one in chain(error))
