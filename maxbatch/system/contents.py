"""The content of an object, checked against the length and the hash that the store sends along."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from maxbatch.system.object_stores import split

_MD5 = re.compile(r"[0-9a-f]{32}")
_PLAIN = (None, "AES256")  # encryptions of S3 under which the ETag of an object is its MD5


def read_whole(file_system: Any, url: str) -> bytes:
    """Returns the content of an object, by one request.

    Raises:
      ConnectionError: another content came than the store holds; it may come whole the next time.
    """
    scheme, bucket, name = split(url)
    if scheme == "gs":
        headers, content = file_system.call("GET", file_system.url(url))
        wanted, has = _of_google(headers, content)
    else:
        answer = file_system.call_s3("get_object", Bucket=bucket, Key=name)
        from fsspec.asyn import sync

        content = sync(file_system.loop, answer["Body"].read)
        wanted, has = _of_amazon(answer, content)
    if wanted != has:
        raise ConnectionError(f"{len(content)} bytes came, which are not the whole object")
    data: bytes = content
    return data


def _of_google(headers: Mapping[str, str], content: bytes) -> tuple[object, object]:
    """Returns the MD5 or else the length that the store states, and that of the content."""
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None, None  # it was unpacked on its way
    hashes = ",".join(value for name, value in headers.items() if name.lower() == "x-goog-hash")
    if md5 := re.search(r"md5=([^,]+)", hashes):
        return md5[1].strip(), base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    return int(headers.get("x-goog-stored-content-length", len(content))), len(content)


def _of_amazon(answer: Mapping[str, Any], content: bytes) -> tuple[object, object]:
    """Returns the MD5 that the store states and that of the content; nothing of an object written in parts."""
    etag = str(answer.get("ETag", "")).strip('"')
    if not _MD5.fullmatch(etag) or answer.get("ServerSideEncryption") not in _PLAIN or "SSECustomerAlgorithm" in answer:
        return None, None
    return etag, hashlib.md5(content, usedforsecurity=False).hexdigest()
