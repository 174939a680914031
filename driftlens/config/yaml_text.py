"""YAML in and out, by the safe loader only."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from driftlens.utils.errors import SpecError
from driftlens.utils.files import plain_file

# YAML 1.1 reads 1e-4 as text because it has no dot, but users mean the number.
_FLOAT_WITHOUT_DOT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")


# Limits of a spec or value: characters of text, and values after aliases are expanded.
MOST_CHARACTERS, MOST_NODES = 4_000_000, 100_000


class _Loader(yaml.SafeLoader):
    """The safe loader, with `1e-4` as a number; keys that occur twice and what would not end are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes, self._sizes = 0, dict[int, int]()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        before, is_alias = self._nodes, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        # Counted in full, so that a small file of nested aliases cannot fill the memory.
        if is_alias:
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "holds itself", node.start_mark)
            self._nodes += self._sizes[id(node)]
        else:
            self._nodes += 1
            self._sizes[id(node)] = self._nodes - before
        if self._nodes > MOST_NODES:
            reason = f"more than {MOST_NODES:,} values, aliases counted in full"
            raise yaml.composer.ComposerError(None, None, reason, node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"not a value of {node.tag}", node.start_mark
            ) from error
        if type(value) is int and value.bit_length() > 64:
            raise yaml.constructor.ConstructorError(
                None, None, "a whole number of more than 64 bits", node.start_mark
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        # PyYAML keeps the last of duplicate keys without a warning. Merge keys (`<<`) may repeat.
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that `_Loader` would take for a number, and never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML takes these for line breaks (or drops them) unless they are escaped between double quotes.
_NEEDS_ESCAPES = re.compile("[\x85\u2028\u2029\ufeff]")


def _quoted_where_needed(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _NEEDS_ESCAPES.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted_where_needed)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_WITHOUT_DOT, list("-+0123456789"))


# Texts up to this length are cached: a job reads a spec several times, and the safe loader is slow.
_MAX_CACHED = 1 << 16


@functools.lru_cache(8)
def _loaded(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def from_yaml(text: str, where: str) -> Any:
    """Parse YAML text."""
    if len(text) > MOST_CHARACTERS:
        raise SpecError(f"{where}: {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        return copy.deepcopy(_loaded(text)) if len(text) <= _MAX_CACHED else _loaded.__wrapped__(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = (
            "Custom YAML tags (`!name`) are not supported; remove the tag."
            if "constructor" in str(error.problem)
            else ""
        )
        hint = hint or "Check indentation, colons and quotes at that place."
        raise SpecError(f"{where}{place}: {error.problem or error.context}", hint=hint) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{where}: not YAML: {error}") from error
    except RecursionError:
        # Without the cause, whose traceback has a thousand equal lines.
        raise SpecError(f"{where}: lists or mappings are nested too deeply to be read") from None


def read_mapping(file: Path, what: str, start: str) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Args:
        file: the file.
        what: its name in messages.
        start: a hint how to begin.
    """
    try:
        # /dev/stdin and /dev/fd/63 are pipes from the shell; endless devices stop at the limit.
        place = file if file.is_relative_to("/dev") else plain_file(file)
        with place.open(encoding="utf-8-sig") as stream:
            raw = from_yaml(stream.read(MOST_CHARACTERS + 1), str(file))
    except (OSError, UnicodeDecodeError) as error:
        inside = file / "spec.yaml"
        hint = f"Give {inside}." if inside.is_file() else f"Check the path. {start}"
        raise SpecError(f"{file}: the {what} can't be read: {error}", hint=hint) from error
    if not isinstance(raw, dict):
        raise SpecError(f"{file}: expected a mapping, found {type(raw).__name__}", hint=start)
    return raw


def to_yaml(value: Any) -> str:
    """Write YAML that `from_yaml` reads back to an equal value, keys in the given order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
