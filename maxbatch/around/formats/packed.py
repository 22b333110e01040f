"""Files of text that may be packed by gzip, as one stream of text."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator
from typing import TextIO

from maxbatch.data.store.files import open_file
from maxbatch.data.store.gzip_cuts import MAGIC
from maxbatch.system.storage.source_files import SourceFile


@contextlib.contextmanager
def opened_text(file: SourceFile) -> Iterator[TextIO]:
    """Opens a file of UTF-8 text, plain or gzip (recognised by its first bytes), without its byte
    order mark.

    Bytes that are not UTF-8 become lone surrogates, so that only the records with them are bad.
    """
    with open_file(file) as stream:
        is_gzip = stream.read(len(MAGIC)) == MAGIC
        stream.seek(0)
        content = io.BufferedReader(gzip.GzipFile(fileobj=stream)) if is_gzip else stream
        yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
