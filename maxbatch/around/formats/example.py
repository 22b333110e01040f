"""tf.train.Example, read without TensorFlow: one of its features, a text or a list of token ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from maxbatch.config.values import shown
from maxbatch.data.store.formats import TokenIds

# The declaration of tf.train.Example, for reading it without TensorFlow. Field numbers are
# TensorFlow's (core/example/example.proto, feature.proto). Lists of floats are not declared:
# protobuf skips fields that it does not know.
_DECLARATION = """
name: "maxbatch/example.proto" package: "maxbatch" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 type_name: ".maxbatch.BytesList" }
  field { name: "int64_list" number: 3 type_name: ".maxbatch.Int64List" }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type_name: ".maxbatch.Feature" }
    options { map_entry: true }
  }
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".maxbatch.Features.FeatureEntry" }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: ".maxbatch.Features" } }
"""


def example_field(record: bytes, name: str) -> bytes:
    """Returns the feature `name` of a serialised tf.train.Example: one string of bytes, or a list
    of token ids.

    Raises:
      ValueError: not an Example; no such feature; or the feature is neither.
    """
    from google.protobuf.message import DecodeError

    example = _example_class()()
    try:
        example.ParseFromString(record)
    except DecodeError as error:
        raise ValueError(
            "not a tf.train.Example; record_format=text reads records as UTF-8 text"
        ) from error
    features = example.features.feature
    if name not in features:
        names = shown(", ".join(map(repr, sorted(features)[:8])))
        names = names or "none (record_format=text reads plain text)"
        raise ValueError(f"no feature text_field={shown(repr(name))}; its features: {names}")
    if features[name].HasField("int64_list"):
        return TokenIds(np.array(features[name].int64_list.value, "<i8").tobytes())
    values = features[name].bytes_list.value
    if len(values) != 1:
        problem = f"holds {len(values)} byte strings, not one, and no list of token ids"
        raise ValueError(f"feature text_field={shown(repr(name))} {problem}")
    value: bytes = values[0]
    return value


@cache
def _example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    # In a pool of its own, so that it does not clash with TensorFlow's declaration if that is
    # loaded too.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_DECLARATION, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxbatch.Example"))
