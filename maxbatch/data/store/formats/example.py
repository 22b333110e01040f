"""tf.train.Example without TensorFlow: the declaration of the message, and a reader of one field.

Field numbers are TensorFlow's (core/example/example.proto, feature.proto). Lists of numbers are not declared: protobuf
skips fields that it does not know.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from maxbatch.config.values import shown


class ExampleError(ValueError):
    """A record that is not an Example, or lacks the text."""


def example_field(record: bytes, name: str) -> bytes:
    """Returns the bytes of the feature `name` of a serialised tf.train.Example.

    Raises:
      ExampleError: not an Example; no such feature; or the feature is not one string of bytes.
    """
    from google.protobuf.message import DecodeError

    example = _example_class()()
    try:
        example.ParseFromString(record)
    except DecodeError as error:
        raise ExampleError(
            "not a tf.train.Example; record_format=text reads records as UTF-8 text"
        ) from error
    features = example.features.feature
    if name not in features:
        names = shown(", ".join(map(repr, sorted(features)[:8])))
        names = names or "none (record_format=text reads plain text)"
        raise ExampleError(f"no feature text_field={shown(repr(name))}; its features: {names}")
    values = features[name].bytes_list.value
    if len(values) != 1:
        raise ExampleError(
            f"feature text_field={shown(repr(name))} holds {len(values)} byte strings, not one"
        )
    return values[0]


@cache
def _example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="maxbatch/example.proto", package="maxbatch", syntax="proto3"
    )
    field_type = descriptor_pb2.FieldDescriptorProto

    def message(parent: Any, name: str) -> Any:
        messages = parent.message_type if parent is file else parent.nested_type
        return messages.add(name=name)

    def field(parent: Any, name: str, number: int, kind: int, of: str = "", repeated: bool = False) -> None:
        label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
        parent.field.add(name=name, number=number, type=kind, type_name=of or None, label=label)

    field(message(file, "BytesList"), "value", 1, field_type.TYPE_BYTES, repeated=True)
    field(message(file, "Feature"), "bytes_list", 1, field_type.TYPE_MESSAGE, ".maxbatch.BytesList")
    features = message(file, "Features")
    entry = message(features, "FeatureEntry")
    entry.options.map_entry = True
    field(entry, "key", 1, field_type.TYPE_STRING)
    field(entry, "value", 2, field_type.TYPE_MESSAGE, ".maxbatch.Feature")
    of_map = ".maxbatch.Features.FeatureEntry"
    field(features, "feature", 1, field_type.TYPE_MESSAGE, of_map, repeated=True)
    field(message(file, "Example"), "features", 1, field_type.TYPE_MESSAGE, ".maxbatch.Features")
    # In a pool of its own, so that it does not clash with TensorFlow's declaration if that is loaded too.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxbatch.Example"))
