"""Google Cloud Storage: requests through gcsfs to the JSON API, and settings of its clients."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import quote

from maxbatch.system.storage.stores.store import CONNECT_S, LOST, READ_S, Content, FileSystem

_TOKEN_S = 1.0  # until a request that was refused for its token is made once more


class GoogleFiles(FileSystem, Protocol):
    """The file system of gcsfs."""

    base: str

    async def _request(self, *arguments: object, **options: object) -> object: ...
    def url(self, path: str) -> str: ...
    def call(self, method: str, path: str, **request: object) -> Any: ...


class Google:
    """`gs://`, whose versions are generations."""

    package, extra = "gcsfs", "gcs"
    sign_in = (
        "sign in with `gcloud auth application-default login`, or give the machine a service "
        "account"
    )
    needs = "roles/storage.objectUser and roles/storage.legacyBucketReader on the bucket"
    variables: tuple[str, ...] = ("STORAGE_EMULATOR_HOST",)
    make_bucket = "gcloud storage buckets create gs://"

    def configure(self, conf: dict[str, object]) -> None:
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            conf.setdefault("token", "anon")
        if "requests_timeout" not in conf and importlib.util.find_spec("aiohttp"):
            import aiohttp

            conf["requests_timeout"] = aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S, sock_read=READ_S
            )

    def try_once(self, files: GoogleFiles) -> None:
        from gcsfs.retry import HttpError

        repeated = type(files)._request
        request = getattr(repeated, "__wrapped__", repeated)

        async def once(*arguments: object, **options: object) -> object:
            try:
                return await request(files, *arguments, **options)
            except HttpError as error:
                if error.code != HTTPStatus.UNAUTHORIZED:
                    raise
            await asyncio.sleep(_TOKEN_S)  # the token expired on the way, and nothing was done
            return await request(files, *arguments, **options)

        files._request = once  # type: ignore[method-assign]

    def version(self, files: GoogleFiles, bucket: str, name: str) -> str:
        return str(files.call("GET", _object(bucket, name), json_out=True)["generation"])

    def read(self, files: GoogleFiles, bucket: str, name: str) -> Content:
        headers, content = files.call("GET", files.url(f"gs://{bucket}/{name}"))
        return Content(content, headers.get("x-goog-generation", ""), *_stated(headers, content))

    def write(
        self, files: GoogleFiles, bucket: str, name: str, data: bytes, version: str | None
    ) -> str:
        service = files.base.removesuffix("/storage/v1/")
        path, mark = f"{service}/upload/storage/v1/b/{quote(bucket)}/o", secrets.token_hex(16)
        named = f"--{mark}\nContent-Type: application/json\n\n{json.dumps({'name': name})}\n"
        begin = f"{named}--{mark}\nContent-Type: application/octet-stream\n\n"
        # multipart, since an empty body counts as none
        body = begin.encode() + data + f"\n--{mark}--".encode()
        headers = {"Content-Type": f'multipart/related; boundary="{mark}"'}
        match = version or "0"
        answer = files.call(
            "POST",
            path,
            uploadType="multipart",
            ifGenerationMatch=match,
            headers=headers,
            data=body,
            json_out=True,
        )
        return str(answer["generation"])

    def remove(self, files: GoogleFiles, bucket: str, name: str, version: str) -> bool:
        files.call("DELETE", _object(bucket, name), ifGenerationMatch=version)
        return True

    def join(
        self, files: GoogleFiles, bucket: str, name: str, version: str, size: int, data: bytes
    ) -> None:
        tail = f"{name}.tail"
        try:  # by version: a stopped writer may write its own tail at any time
            tail_version = self.version(files, bucket, tail)
        except FileNotFoundError:
            tail_version = None
        written = self.write(files, bucket, tail, data, tail_version)
        parts = [{"name": name}, {"name": tail, "generation": written}]
        sources = {"sourceObjects": parts, "destination": {"contentType": "text/plain"}}
        files.call(
            "POST", f"{_object(bucket, name)}/compose", json=sources, ifGenerationMatch=version
        )
        try:
            self.remove(files, bucket, tail, written)
        except Exception as error:
            if not (isinstance(error, FileNotFoundError) or self.status(error) in LOST):
                raise

    def status(self, error: BaseException) -> int | None:
        from aiohttp import ClientResponseError
        from gcsfs.retry import HttpError, is_retriable
        from google.auth.exceptions import GoogleAuthError, TransportError

        if isinstance(error, HttpError):
            return int(error.code) if error.code else HTTPStatus.SERVICE_UNAVAILABLE
        if isinstance(error, ClientResponseError):
            return int(error.status)
        if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
            return HTTPStatus.UNAUTHORIZED
        if isinstance(error, TransportError | json.JSONDecodeError) or is_retriable(error):
            return HTTPStatus.SERVICE_UNAVAILABLE
        return (
            HTTPStatus.FORBIDDEN
            if isinstance(error, OSError) and str(error).startswith("Forbidden")
            else None
        )


def _object(bucket: str, name: str) -> str:
    """Returns the path of an object in the JSON API."""
    return f"b/{quote(bucket)}/o/{quote(name, safe='')}"


def _stated(headers: Mapping[str, str], content: bytes) -> tuple[object, object]:
    """Returns the store's MD5, or else its length, and the content's."""
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None, None  # decompressed on the way
    hashes = ",".join(value for name, value in headers.items() if name.lower() == "x-goog-hash")
    if md5 := re.search(r"md5=([^,]+)", hashes):
        return md5[1].strip(), base64.b64encode(
            hashlib.md5(content, usedforsecurity=False).digest()
        ).decode()
    return int(headers.get("x-goog-stored-content-length", len(content))), len(content)
