from __future__ import annotations

import pathlib
import re
import urllib.parse

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driftlens.runs.layout import escape, feature_file

# Names in which escapes, colons and underscores meet, besides any unicode.
NAMES = st.text(min_size=1) | st.text(alphabet="ab:_%.-/3AF", min_size=1, max_size=8)


@given(NAMES)
@example("a__b")
@example("_:_")
@example("%3A")
@example("..")
def test_a_name_survives_being_a_file_name(name: str) -> None:
    assert urllib.parse.unquote(escape(name).replace("__", ":")) == name


@given(NAMES)
def test_a_file_name_is_safe_everywhere(name: str) -> None:
    file_name = escape(name)
    assert re.fullmatch(r"[A-Za-z0-9._%-]+", file_name)
    assert not file_name.startswith(".")


@pytest.mark.parametrize(
    ("name", "file_name"),
    [("calibrated:featcal", "calibrated__featcal"), ("sun397", "sun397"), ("a/b", "a%2Fb"), ("é", "%C3%A9")],
    ids=["colon", "plain", "slash", "accent"],
)
def test_the_escape_is_the_documented_one(name: str, file_name: str) -> None:
    assert escape(name) == file_name


def test_no_task_name_leaves_the_run() -> None:
    path = pathlib.PurePosixPath(feature_file("../..", "..", 3))
    assert ".." not in path.parts
    assert path.parts[0] == "features" and path.name == "003.npy"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        escape("")
