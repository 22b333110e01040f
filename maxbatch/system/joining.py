"""Objects that grow inside of their store: GCS composes objects, S3 copies parts. Sends the new bytes only."""

from __future__ import annotations

from typing import Any

from maxbatch.system.object_stores import gcs_object, persist, split
from maxbatch.system.remote_path import RemotePath

_LARGEST_PART = 5 << 30  # of S3; the smallest, but for the last, has 5 MiB


def join(path: RemotePath, size: int, data: bytes) -> None:
    """Adds bytes to the end of an object of `size` bytes, so that readers see it before or after, never between.

    Done again after a lost answer it adds nothing twice: the object's size tells whether it was done.
    """
    scheme, bucket, name = split(path.url)

    def add() -> None:
        if path.stat().st_size == size + len(data):
            return
        if scheme == "gs":
            _compose(path.file_system, bucket, name, data)
        else:
            _copy_parts(path.file_system, bucket, name, size, data)

    persist(path.url, add)


def _compose(file_system: Any, bucket: str, name: str, data: bytes) -> None:
    tail = f"{name}.tail"
    file_system.pipe_file(f"gs://{bucket}/{tail}", data)
    sources = {"sourceObjects": [{"name": name}, {"name": tail}], "destination": {"contentType": "text/plain"}}
    file_system.call("POST", f"{gcs_object(bucket, name)}/compose", json=sources)
    file_system.rm_file(f"gs://{bucket}/{tail}")


def _copy_parts(file_system: Any, bucket: str, name: str, size: int, data: bytes) -> None:
    where = {"Bucket": bucket, "Key": name}
    upload = {**where, "UploadId": file_system.call_s3("create_multipart_upload", **where)["UploadId"]}
    parts = []
    for number, begin in enumerate(range(0, size, _LARGEST_PART), start=1):
        end = min(size, begin + _LARGEST_PART) - 1
        copied = file_system.call_s3(
            "upload_part_copy", **upload, PartNumber=number, CopySource=where, CopySourceRange=f"bytes={begin}-{end}"
        )
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    last = file_system.call_s3("upload_part", **upload, PartNumber=len(parts) + 1, Body=data)
    parts.append({"PartNumber": len(parts) + 1, "ETag": last["ETag"]})
    file_system.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
