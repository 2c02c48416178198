"""YAML as people expect it: a key written twice is an error, and 1e-3 is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, takes an exponent without a decimal point for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse(text: str, where: str) -> Any:
    """The value of a YAML text.

    Args:
        text: one YAML document.
        where: file or option, for the error.

    Raises:
        ValueError: not YAML, or a key written twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def load(path: Path) -> Any:
    """The value of a YAML file; raises as `parse` does, and FileNotFoundError that names the path."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    return parse(path.read_text(encoding="utf-8"), str(path))
