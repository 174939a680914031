"""JSON lines: pairs of texts under their line numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driftlens.base.errors import DataError
from tests.data.sources import opened
from tests.refusing import refusing


def entry(folder: Path, text: str | bytes, **values: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return {"kind": "jsonl", "calibration": str(file), "test": str(file), **values}


def test_ids_are_line_numbers_and_blank_lines_count(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines but may stand in a JSON string.
    text = '{"input": "a\u2028b", "target": "x"}\n\n{"input": "ü", "target": "", "more": 1}\r\n'
    view = opened(**entry(tmp_path, text))
    assert view.holds == "text"
    assert view.ids == ("1", "3")
    assert [view.read(position) for position in range(2)] == [("a\u2028b", "x"), ("ü", "")]
    assert (view.class_names, view.label(0)) == (None, None)


def test_the_keys_may_have_other_names(tmp_path: Path) -> None:
    view = opened(**entry(tmp_path, '{"q": "1+1", "a": "2"}', input="q", target="a"))
    assert view.holds == "text"
    assert view.read(0) == ("1+1", "2")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        pytest.param('{"input": "a"', "line 1: not JSON", "one JSON object per line", id="cut short"),
        pytest.param(
            '{"input": "a", "target": "b"}\n[1]', "line 2: a list, expected an object", "", id="a list"
        ),
        pytest.param('{"target": "a"}', "no column 'input'; there are target", "`input: COL", id="no input"),
        pytest.param("\n\n", "no rows", "one JSON object per line", id="only blank lines"),
        pytest.param(b"\xff\xfe{", "not UTF-8", "UTF-8", id="another encoding"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(
    tmp_path: Path, text: str | bytes, message: str, hint: str
) -> None:
    with refusing(DataError, message, "rows.jsonl", hint=hint):
        opened(**entry(tmp_path, text))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    values = entry(tmp_path, "")
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl: can't be read"):
        opened(**values)
