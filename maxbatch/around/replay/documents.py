"""The documents of samples: where they came from, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.data.store.record_places import RecordPlace, places_of
from maxbatch.data.stream.rows import RowArrays, RowDocument
from maxbatch.data.stream.stream import Stream
from maxbatch.system.storage.storage import AnyPath


class SampleDocument(NamedTuple):
    """A part of a document in a sample."""

    # the file and record, or without them the store and the number of the document in it; neither
    # if samples are computed
    file: str | None
    record: int | None
    store: str | None
    document: int | None
    offset: int  # its first token in the document, from 0
    tokens: int
    text: str

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        place: dict[str, object] = {"file": self.file, "record": self.record}
        if self.store is not None:
            place = {"store": self.store, "document": self.document}
        return {**place, "offset": self.offset, "tokens": self.tokens, "text": self.text}

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.file}:{self.record}"
        return "" if self.store is None else f"{self.store} document {self.document}"


def documents_of(
    stream: Stream, indices: Sequence[int], rows: RowArrays
) -> list[list[SampleDocument]]:
    """Returns the documents of each of some samples.

    Args:
      indices: of the samples in the stream that holes leave.
      rows: the samples, arrays [n, L].
    """
    by_sample = [stream.documents(index) for index in indices]
    places = _places([document for documents in by_sample for document in documents])
    return [
        list(_of_sample(stream, tokens, segments, documents, places))
        for tokens, segments, documents in zip(
            rows["tokens"], rows["segments"], by_sample, strict=True
        )
    ]


def _places(documents: Sequence[RowDocument]) -> Mapping[tuple[AnyPath, int], RecordPlace]:
    stores = {document.store for document in documents}
    return {
        (store, record): place
        for store in stores
        for record, place in places_of(
            store, [document.record for document in documents if document.store == store]
        ).items()
    }


def _of_sample(
    stream: Stream,
    tokens: np.ndarray,
    segments: np.ndarray,
    documents: Sequence[RowDocument],
    places: Mapping[tuple[AnyPath, int], RecordPlace],
) -> Iterator[SampleDocument]:
    for segment in range(1, int(segments.max(initial=0)) + 1):
        ids = tokens[segments == segment]
        text = stream.tokenizer.decode(ids)
        if not documents:
            yield SampleDocument(None, None, None, None, 0, len(ids), text)
            continue
        document = documents[segment - 1]
        place = places.get((document.store, document.record))
        if place is None:
            store, number = str(document.store), document.document
            yield SampleDocument(None, None, store, number, document.offset, len(ids), text)
        else:
            yield SampleDocument(
                place.file, place.record, None, None, document.offset, len(ids), text
            )
