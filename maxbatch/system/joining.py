"""Objects that grow inside of their store: GCS composes objects, S3 copies parts. Sends the new bytes only."""

from __future__ import annotations

from maxbatch.system import fences, preconditions
from maxbatch.system.errors import TrainingError
from maxbatch.system.object_stores import gcs_object, persist, split
from maxbatch.system.preconditions import has_lost
from maxbatch.system.remote_path import RemotePath

_LARGEST_PART = 5 << 30  # of S3; the smallest, but for the last, has 5 MiB


def join(path: RemotePath, size: int, data: bytes) -> None:
    """Adds bytes to the end of an object of `size` bytes, so that readers see it before or after, never between.

    Done again after a lost answer it adds nothing twice: the object's size tells whether it was done. The object is
    changed only if it is still the one whose size was read.

    Raises:
      LeaseLost: another process holds the lease of the folder.
      TrainingError: another process has written the object.
    """

    def add() -> None:
        version, found = fences.version_of(path.url), path.stat().st_size
        if found == size + len(data):
            return
        fences.ask(path.url)
        if found != size or version is None:
            raise TrainingError(f"{path}: another process has written to it; this one stops")
        try:
            if path.url.startswith("gs:"):
                _compose(path, version, data)
            else:
                _copy_parts(path, version, size, data)
        except Exception as error:
            if not has_lost(error):
                raise
            raise ConnectionError("it was changed meanwhile") from None  # looked at once more

    persist(path.url, add)


def _compose(path: RemotePath, version: str, data: bytes) -> None:
    _, bucket, name = split(path.url)
    tail = path.with_name(f"{path.name}.tail")
    # By its version: a writer that was stopped may write a tail of its own at any time.
    tails = preconditions.write(path.file_system, tail.url, data, fences.version_of(tail.url))
    if tails is None:
        raise ConnectionError("its tail was changed meanwhile")
    last = {"name": f"{name}.tail", "generation": tails}
    sources = {"sourceObjects": [{"name": name}, last], "destination": {"contentType": "text/plain"}}
    where = f"{gcs_object(bucket, name)}/compose"
    path.file_system.call("POST", where, json=sources, ifGenerationMatch=version)
    preconditions.remove(path.file_system, tail.url, tails)


def _copy_parts(path: RemotePath, version: str, size: int, data: bytes) -> None:
    file_system = path.file_system
    _, bucket, name = split(path.url)
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
    file_system.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfMatch=version)
