"""Bounds for foreign YAML: size, depth and expansion, each with its own message."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from maxbatch.system.storage.bounded import MOST_DEPTH, RefusedContent, check_size, too_deep

# PyYAML composes about 20,000 nodes a second.
MOST_YAML_NODES = 50_000
MOST_YAML_CHARACTERS = 1 << 20  # a second of its scanner


def compose_yaml(text: str, label: str, *, most_nodes: int = MOST_YAML_NODES) -> yaml.Node | None:
    """Parses YAML into a finite tree of nodes, None for an empty text. Aliases share nodes.

    Args:
      label: its name in messages.
      most_nodes: bound on values and keys after expanding every alias.

    Raises:
      RefusedContent: the text exceeds a bound, or an alias refers to a node around it.
      yaml.YAMLError: the text is not YAML.
    """
    check_size(len(text), label, MOST_YAML_CHARACTERS)
    loader = _Composer(text, label, most_nodes)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    if root is not None and _expanded(root, label, {}) > most_nodes:
        raise RefusedContent(
            f"{label}: expands by its aliases to more than {most_nodes:,} values, the most read"
        )
    return root


class _Composer(yaml.SafeLoader):
    """PyYAML's composer with bounds on depth and nodes."""

    def __init__(self, text: str, label: str, most_nodes: int) -> None:
        super().__init__(text)
        self._label, self._most_nodes = label, most_nodes
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Composes the next node, within the bounds."""
        self._nodes += 1
        self._depth += 1
        if self._depth > MOST_DEPTH + 1:
            raise RefusedContent(too_deep(self._label, MOST_DEPTH))
        if self._nodes > self._most_nodes:
            raise RefusedContent(
                f"{self._label}: holds more than {self._most_nodes:,} values, the most that are read"
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _expanded(node: yaml.Node, label: str, sizes: dict[int, int | None]) -> int:
    """Counts the nodes of a tree with aliases expanded; `sizes` holds None for nodes in
    progress.
    """
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise RefusedContent(
                f"{label}: an alias refers to a value that holds it, so it never ends"
            )
        return size
    sizes[id(node)] = None
    size = 1 + sum(_expanded(child, label, sizes) for child in _children(node))
    sizes[id(node)] = size
    return size


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (part for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
