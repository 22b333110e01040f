"""S3, Amazon's and others': requests through s3fs, and settings of its clients."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

from maxbatch.system.storage.stores.store import (
    CONNECT_S,
    MAX_REQUESTS,
    READ_S,
    Content,
    FileSystem,
    chain,
)

_LARGEST_PART = 5 << 30  # of a multipart upload; the smallest, except the last, has 5 MiB
_MD5 = re.compile(r"[0-9a-f]{32}")
_PLAIN = (None, "AES256")  # encryptions with the MD5 as the ETag
_STATUSES = {  # by error code, where the HTTP status differs
    "ExpiredToken": HTTPStatus.UNAUTHORIZED,
    "InvalidToken": HTTPStatus.UNAUTHORIZED,
    "InvalidAccessKeyId": HTTPStatus.UNAUTHORIZED,
    "SignatureDoesNotMatch": HTTPStatus.UNAUTHORIZED,
    "QuotaExceeded": HTTPStatus.INSUFFICIENT_STORAGE,
    "RequestTimeout": HTTPStatus.SERVICE_UNAVAILABLE,
    "InternalError": HTTPStatus.SERVICE_UNAVAILABLE,  # also in an answer of 200
}


class S3Files(FileSystem, Protocol):
    """The file system of s3fs."""

    loop: object
    retries: int

    def call_s3(self, method: str, **request: object) -> dict[str, Any]: ...


class Amazon:
    """`s3://`, whose versions are ETags."""

    package, extra = "s3fs", "s3"
    sign_in = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or give the machine a "
        "role"
    )
    needs = "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket"
    variables: tuple[str, ...] = (
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
    )
    make_bucket = "aws s3 mb s3://"

    def configure(self, conf: dict[str, object]) -> None:
        pool = {"max_pool_connections": MAX_REQUESTS}
        users = conf.get("config_kwargs")
        settings = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, **pool}
        settings |= users if isinstance(users, dict) else {}
        conf["config_kwargs"] = settings | {"retries": {"total_max_attempts": 1}}

    def try_once(self, files: S3Files) -> None:
        files.retries = 1  # beside botocore's own, which `configure` ends

    def version(self, files: S3Files, bucket: str, name: str) -> str:
        return str(files.call_s3("head_object", Bucket=bucket, Key=name)["ETag"])

    def read(self, files: S3Files, bucket: str, name: str) -> Content:
        from fsspec.asyn import sync

        answer = files.call_s3("get_object", Bucket=bucket, Key=name)
        content: bytes = sync(files.loop, answer["Body"].read)
        return Content(content, str(answer["ETag"]), *_stated(answer, content))

    def write(
        self, files: S3Files, bucket: str, name: str, data: bytes, version: str | None
    ) -> str:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return str(
            files.call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)["ETag"]
        )

    def remove(self, files: S3Files, bucket: str, name: str, version: str) -> bool:
        where = {"Bucket": bucket, "Key": name}
        if files.call_s3("head_object", **where)["ETag"] != version:
            return False
        try:
            files.call_s3("delete_object", **where, IfMatch=version)
        except Exception as error:
            if not any(self.status(cause) == 501 for cause in chain(error)):
                raise
            files.call_s3("delete_object", **where)  # some S3 stores lack conditional deletes
        return True

    def join(
        self, files: S3Files, bucket: str, name: str, version: str, size: int, data: bytes
    ) -> None:
        where = {"Bucket": bucket, "Key": name}
        upload = {
            **where,
            "UploadId": files.call_s3("create_multipart_upload", **where)["UploadId"],
        }
        parts = []
        for number, begin in enumerate(range(0, size, _LARGEST_PART), start=1):
            span = f"bytes={begin}-{min(size, begin + _LARGEST_PART) - 1}"
            copied = files.call_s3(
                "upload_part_copy",
                **upload,
                PartNumber=number,
                CopySource=where,
                CopySourceRange=span,
            )
            parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
        last = files.call_s3("upload_part", **upload, PartNumber=len(parts) + 1, Body=data)
        parts.append({"PartNumber": len(parts) + 1, "ETag": last["ETag"]})
        files.call_s3(
            "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfMatch=version
        )

    def status(self, error: BaseException) -> int | None:
        import botocore.exceptions as client
        from aiohttp import ClientError as BrokenResponse
        from s3fs.core import S3_RETRYABLE_ERRORS

        if isinstance(error, client.ClientError):
            code, metadata = (
                error.response["Error"].get("Code"),
                error.response.get("ResponseMetadata", {}),
            )
            return (
                _STATUSES.get(code)
                or metadata.get("HTTPStatusCode")
                or HTTPStatus.SERVICE_UNAVAILABLE
            )
        no_sign_in = (
            client.NoCredentialsError,
            client.PartialCredentialsError,
            client.CredentialRetrievalError,
            client.TokenRetrievalError,
            client.NoAuthTokenError,
            client.SSOError,
        )
        broken = (
            client.ConnectionError,
            client.IncompleteReadError,
            client.FlexibleChecksumError,
            BrokenResponse,
        )
        if isinstance(error, no_sign_in):
            return HTTPStatus.UNAUTHORIZED
        return (
            HTTPStatus.SERVICE_UNAVAILABLE
            if isinstance(error, (*broken, *S3_RETRYABLE_ERRORS))
            else None
        )


def _stated(answer: Mapping[str, object], content: bytes) -> tuple[object, object]:
    """Returns the store's MD5 and the content's; (None, None) for an object written in parts."""
    etag = str(answer.get("ETag", "")).strip('"')
    if (
        not _MD5.fullmatch(etag)
        or answer.get("ServerSideEncryption") not in _PLAIN
        or "SSECustomerAlgorithm" in answer
    ):
        return None, None
    return etag, hashlib.md5(content, usedforsecurity=False).hexdigest()
