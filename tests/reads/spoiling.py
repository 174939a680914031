"""Strategies that spoil what is right: bytes, lines, trees of JSON, words of a command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        10**30,
        -(10**30),
        0.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        " ",
        "a",
        "0",
        "1e30",
        "\x00",
        "\x1b[31m",
        "\x9b2J",
        "\u202e\u200b\u061c\ufeff",
        "\ud800",
        "²",
        "~nobody/x",
        "../..",
        "/proc/self/mem",
    ),
    *(
        "x" * 300,
        "x" * 5000,
        "9" * 5000,
        "!!python/name:os.system",
        "re:(a+)+$",
        "{",
        "2020-13-45",
        "/dev/null",
    ),
    *([], {}, [[]], [{}], {"": ""}, {"a": None}, [None] * 3, {"a": {"a": {"a": {}}}}),
)
"""Values that readers tend to stumble over."""

BYTES = (
    b"\x00",
    b"\xff",
    b"\x80\x04",
    b"PK\x03\x04",
    b"\x1b[2J",
    b"9" * 40,
    b"[" * 2000,
    b'{"a":' * 1000,
    b"\n",
    b"\xed\xa0\x80",
)

places = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
"""Where something is spoiled, as a share of its length."""

byte_spoils = st.lists(
    st.tuples(
        st.sampled_from(("flip", "cut", "insert", "repeat", "drop", "number")),
        places,
        st.integers(0, 255),
        places,
    ),
    min_size=1,
    max_size=4,
)
tree_spoils = st.lists(
    st.tuples(
        st.sampled_from(("value", "value", "key", "drop", "twin", "wrap")),
        st.lists(places, min_size=1, max_size=6),
        places,
    ),
    min_size=1,
    max_size=3,
)
"""Each a kind, the way from the root (a share of the entries at every level), and which nasty value."""


def spoiled_bytes(content: bytes, spoils: Sequence[tuple[str, float, int, float]]) -> bytes:
    """The bytes with these spoils, one after the other."""
    made = bytearray(content)
    for kind, share, value, other in spoils:
        at = int(share * len(made))
        length = 1 + int(other * 64)
        if kind == "flip" and made:
            made[at] = value
        elif kind == "cut":
            del made[at:]
        elif kind == "insert":
            made[at:at] = BYTES[int(other * len(BYTES))]
        elif kind == "repeat":
            made[at:at] = made[at : at + length] * (1 + value % 8)
        elif kind == "drop":
            del made[at : at + length]
        elif kind == "number":  # lengths and offsets in headers
            made[at : at + 4] = (value << (8 * (length % 4))).to_bytes(8, "little")[:4]
    return bytes(made)


def spoiled_tree(tree: Any, spoils: Sequence[tuple[str, Sequence[float], float]]) -> Any:
    """A copy of the tree with these spoils, one after the other."""
    made = json.loads(json.dumps(tree))
    for kind, way, which in spoils:
        bad = copy.deepcopy(NASTY[int(which * len(NASTY))])
        made = _spoiled(made, kind, list(way), bad)
    return made


def _spoiled(node: Any, kind: str, way: list[float], bad: Any) -> Any:
    if not isinstance(node, dict | list) or not node:
        return [node, bad] if kind == "wrap" else bad
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = keys[int(way[0] * len(keys))]
    if len(way) > 1 and isinstance(node[key], dict | list):
        node[key] = _spoiled(node[key], kind, way[1:], bad)
    elif kind == "drop":
        del node[key]
    elif kind == "key" and isinstance(node, dict):
        node[bad if isinstance(bad, str) else str(bad)] = node.pop(key)
    elif kind == "twin" and isinstance(node, list):
        node.append(node[key])
    elif kind == "wrap":
        node[key] = [node[key], bad]
    else:
        node[key] = bad
    return node
