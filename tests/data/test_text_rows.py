"""Rows as questions and answers: the same from every kind of file, by templates, words and rules of the task's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from driftlens.config.data import DataDefaults, fill_template, template_fields
from driftlens.config.spec import load_spec
from driftlens.config.types import to_yaml
from driftlens.data.samples import data_digest
from driftlens.data.task_data import TaskData, open_task_data
from driftlens.models.texts import TextProcessor
from driftlens.utils.errors import DataError, DriftLensError, SpecError
from tests.data.sources import entry_of, opened
from tests.refusing import refusing
from tests.zoo.tokenizers import word_tokenizer

ROWS = [
    {"input": "is it red", "more": "blue", "number": 3, "target": 0},
    {"input": "it is green", "more": "no", "number": 4, "target": 1},
    {"input": "is it blue", "more": "yes", "number": 5, "target": 1},
]


def jsonl(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def both(file: str, kind: str = "jsonl", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "calibration": file, "test": file, **values}


def text_data(form: Any = "decoder", *, tokenizer: Any = None, n: int = 1, **values: Any) -> TaskData:
    reader = TextProcessor(tokenizer or word_tokenizer(form), form, 16, limit=16, start=0)
    defaults = DataDefaults(n=n, n_diagnosis=1)
    return open_task_data("t", entry_of(**values), defaults, list, reads="text", reader=reader)


PROMPT = "question : {input} {more} ? {number} {{more}} answer:"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hf"])
def test_every_kind_of_file_gives_the_same_questions_and_answers(tmp_path: Path, kind: str) -> None:
    values: dict[str, Any] = {"prompt": PROMPT, "words": {0: "no", 1: "yes"}}
    if kind == "jsonl":
        values |= both(jsonl(tmp_path))
    elif kind == "hf":
        import datasets

        rows = datasets.Dataset.from_list([{**row, "text": row["input"], "answer": row["target"]} for row in ROWS])
        rows = rows.remove_columns(["input", "target"]).cast_column("answer", datasets.ClassLabel(names=["n", "y"]))
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "hf")
        values |= {"kind": "hf", "path": str(tmp_path / "hf"), "calibration": "train", "test": "test"}
        values |= {"input": "text", "target": "answer", "words": {"n": "no", 1: "yes"}}
    else:
        file = str(tmp_path / f"rows.{kind}")
        frame = pd.DataFrame(ROWS)
        frame.to_csv(file, index=False) if kind == "csv" else frame.to_parquet(file)
        values |= both(file, "table", input="input")
    view = opened(**values)
    assert (view.holds, view.class_names) == ("text", ("no", "yes"))
    assert view.ids == (("1", "2", "3") if kind == "jsonl" else ("0", "1", "2"))
    wanted = [
        (f"question : {row['input']} {row['more']} ? {row['number']} {{more}} answer:", word)
        for row, word in zip(ROWS, ("no", "yes", "yes"), strict=True)
    ]
    assert [view.read(at) for at in range(3)] == wanted
    assert [view.label(at) for at in range(3)] == [word for _, word in wanted]


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hf"])
def test_questions_about_images_are_the_same_from_every_kind_of_file(tmp_path: Path, kind: str, several: bool) -> None:
    """Several may be about one image, or one about several; what tells data from other data is its pixels."""
    if several and kind == "csv":
        pytest.skip("cells of CSV files hold no lists")
    shades = (10, 200)
    digests = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        for at, shade in enumerate(shades):
            Image.new("RGB", (4, 3), (shade, 0, 0)).save(folder / f"{at}.png")
        rows: list[dict[str, Any]] = [{**row, "file": f"{at % 2}.png"} for at, row in enumerate(ROWS)]
        if several:
            rows = [row | {"file": [row["file"], *["1.png"] * at]} for at, row in enumerate(rows)]
        values: dict[str, Any] = {"prompt": "{more}", "target": "number", "image": "file"}
        if kind == "jsonl":
            values |= both(jsonl(folder, rows))
        elif kind == "hf":
            import datasets

            held = [
                {**row, "file": [*map(str, map(folder.joinpath, row["file"]))]}
                if several
                else {**row, "file": str(folder / row["file"])}
                for row in rows
            ]
            feature = datasets.List(datasets.Image()) if several else datasets.Image()
            data = datasets.Dataset.from_list(held).cast_column("file", feature)
            datasets.DatasetDict(all=data).save_to_disk(folder / "saved")
            values |= both("all", kind="hf", path=str(folder / "saved"))
        else:
            frame, file = pd.DataFrame(rows), folder / f"rows.{kind}"
            frame.to_csv(file, index=False) if kind == "csv" else frame.to_parquet(file)
            values |= both(str(file), "table")
        view = opened(**values)
        read = [view.read(at) for at in range(3)]
        assert [sample[:2] for sample in read] == [("blue", "3"), ("no", "4"), ("yes", "5")]
        shown = [[image().getpixel((0, 0))[0] for image in sample.images] for sample in read]
        assert shown == [[10], [200, *[200] * several], [10, *[200, 200] * several]]
        digests.add(data_digest(view.ids, view.read))
    assert len(digests) == 1
    Image.new("RGB", (4, 3), (shades[0] + 1, 0, 0)).save(tmp_path / "two" / "0.png")
    if kind != "hf":  # which holds the image itself
        assert data_digest(view.ids, view.read) not in digests


def test_rows_whose_image_is_missing_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (4, 3)).save(tmp_path / "0.png")
    rows = [{**row, "file": "0.png"} for row in ROWS[:2]] + [{**ROWS[2], "file": "gone.png"}]
    with pytest.raises(DataError, match="1 of 3 images are missing, such as gone"):
        opened(**both(jsonl(tmp_path, rows)), image="file")


def test_braces_that_are_no_field_stay_and_a_value_is_never_read_as_a_template() -> None:
    template = '{"a": {x}, {{x}} {x!r} {x.y} {} {0}'
    assert template_fields(template) == ("x", "x.y", "0")
    values = {"x": "{x.y}", "x.y": "{{x}}", "0": "{0.__class__}"}
    assert fill_template(template, values) == '{"a": {x.y}, {x} {x!r} {{x}} {} {0.__class__}'


def test_rows_without_answers_are_the_normal_case_of_calibration(tmp_path: Path) -> None:
    bare = [{"input": row["input"]} for row in ROWS]
    file, test = jsonl(tmp_path, bare), jsonl(tmp_path, ROWS, "test.jsonl")
    values = {"kind": "jsonl", "calibration": file, "test": test, "target": "target"}
    for form, shown in (("decoder", "none"), ("encoder-decoder", "expert"), ("encoder", "none")):
        data = text_data(form, **values)
        assert data.calibration.texts is not None and data.calibration.texts.shown == shown
        assert data.calibration.text(0).target == ""
    with pytest.raises(DataError, match="no column 'target'"):
        opened(**{**values, "test": file})
    with pytest.raises(DataError, match="decoder_inputs is target"):
        text_data(**values, decoder_inputs="target")
    with pytest.raises(SpecError, match="no decoder"):
        text_data("encoder", **values, decoder_inputs="none")


def test_calibration_shows_answers_as_the_entry_says_and_the_test_never_does(tmp_path: Path) -> None:
    file = jsonl(tmp_path, ROWS)
    values = both(file, words={0: "no", 1: "yes"}, n=1)
    data = text_data(**values)
    question, answer = data.calibration.text(0)
    assert answer in (" yes", " no") and data.test.text(0).target in (" yes", " no")
    tokens = data.calibration.load([0])["input_ids"][0].tolist()
    assert tokens[-2:] == word_tokenizer().convert_tokens_to_ids(["▁" + answer.strip(), "</s>"])
    assert data.test.load([0])["input_ids"].shape == (1, 4)
    texts = data.test.texts
    assert texts is not None and texts.format_answer("red") == " red"
    silent = text_data(**values, decoder_inputs="none").calibration
    assert silent.load([0])["input_ids"][0].tolist() == tokens[:-2]
    answered = silent.with_answers([answer]).load([0])["input_ids"][0].tolist()
    assert answered == tokens
    plain = text_data("encoder-decoder", **values).calibration
    assert plain.text(0) == (question, answer.strip())
    assert plain.with_answers(["red"]).load([0])["decoder_input_ids"].tolist() == [
        [0, *word_tokenizer("encoder-decoder").convert_tokens_to_ids(["red"])]
    ]
    asked = text_data("encoder-decoder", **values, answer="answer: {target}").calibration
    assert asked.text(0).target == f"answer: {answer.strip()}"


def test_a_chat_template_stands_around_the_question(tmp_path: Path) -> None:
    file = jsonl(tmp_path)
    tokenizer = word_tokenizer()
    turn = "{% if add_generation_prompt %} answer:{% endif %}"
    tokenizer.chat_template = "{{ bos_token }}question: {{ messages[0]['content'] }}" + turn
    data = text_data(tokenizer=tokenizer, **both(file, words={0: "no", 1: "yes"}, chat=True))
    question, answer = data.test.text(0)
    assert question.startswith("<s>question: i") and question.endswith(" answer:") and answer in ("yes", "no")
    ids = data.test.load([0])["input_ids"][0].tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(ValueError, match="chat template"):
        text_data(**both(file, chat=True))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Exception, match="roles must alternate"):
        text_data(tokenizer=tokenizer, **both(file, chat=True))


def test_rows_that_are_too_long_are_counted_or_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"input": "is it " * at} for at in (1, 2, 3, 4)])
    values = both(file, max_length=6)
    data = text_data(**values)
    lengths = {sample: 1 + 2 * int(sample) for sample in data.test.ids}  # the line's number; a beginning, two words
    count = sum(length > 6 for length in lengths.values())
    [told] = [notice for notice in data.notices if " test samples are longer" in notice]
    assert told == f"t: {count} of 3 test samples are longer than 6 tokens; of a longer question the beginning is cut"
    assert data.test.load(range(3))["input_ids"].shape == (3, 6)
    with pytest.raises(DataError, match="are longer than 6 tokens, such as"):
        text_data(**values, too_long="refuse")
    with pytest.raises(SpecError, match=r"data\.t\.max_length is 17; .* 16 positions"):
        text_data(**both(file, max_length=17))


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([{"input": " \n", "target": "a"}] * 2, {}, "line 1: the text is empty ('input')"),
        (ROWS, {"prompt": "{text} ?"}, "no column 'text'; columns are input, more, number, target"),
        (ROWS, {"words": {0: "no"}}, "line 2: target '1' is not in the words: 0"),
        (ROWS, {"classes": ["0", "2"]}, "line 2: target '1' is not in the classes: 0, 2"),
        ([{"input": "a", "target": ["b"]}] * 2, {}, "line 1: 'target' is ['b'], expected text or a number"),
        ([{"input": None, "target": "a"}] * 2, {}, "line 1: 'input' is None, expected text"),
        ([{"input": "a", "target": "b"}, {"input": "b"}], {}, "has no target, others do"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_by_its_place(
    tmp_path: Path, rows: list[dict[str, Any]], values: dict[str, Any], message: str
) -> None:
    test = jsonl(tmp_path, [{**ROWS[0], "target": "0"}], "test.jsonl")
    entry = {"kind": "jsonl", "calibration": jsonl(tmp_path, rows), "test": test, **values}
    with refusing(DataError, message):
        text_data(n=len(rows), **entry)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "table", "target": "a"}, "target needs a text column"),
        ({"kind": "table", "classes": True}, "classes needs a text column"),
        ({"kind": "table", "input": "a", "label": "b"}, "label belongs to images"),
        ({"kind": "jsonl", "prompt": "Say yes."}, "has no field"),
        ({"kind": "jsonl", "prompt": "{a}: {b}", "target": "b"}, "the prompt contains the answer, b"),
        ({"kind": "jsonl", "answer": "{b}"}, "must have the field {target} only"),
    ],
)
def test_what_contradicts_itself_is_refused_in_the_spec(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DriftLensError) as caught:
        entry_of(calibration="x", test="x", **values)
    assert message in str(caught.value)


def test_an_entry_that_is_spelled_out_means_the_same(tmp_path: Path) -> None:
    for values in (
        both("x", "table", input="question", words={1: "yes", False: "no"}),
        both("x", prompt="{a} ?", classes=["a", "b"]),
        both("x", "table", image="picture", classes=["a"]),
    ):
        spec = load_spec(
            {
                "version": 1,
                "architecture": {"loader": "open-clip", "source": "any"},
                "merged": {"weights": "org/merged"},
                "experts": {"task": {"weights": "org/expert"}},
                "data": {"task": values},
            }
        )
        (tmp_path / "spec.yaml").write_text(to_yaml(spec.as_dict()))
        assert load_spec(tmp_path / "spec.yaml").data.tasks == spec.data.tasks


# --- JSON lines


def lines(folder: Path, text: str | bytes, **values: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return {"kind": "jsonl", "calibration": str(file), "test": str(file), **values}


def test_ids_are_line_numbers_and_blank_lines_count(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines but may stand in a JSON string.
    text = '{"input": "a\u2028b", "target": "x"}\n\n{"input": "ü", "target": "", "more": 1}\r\n'
    view = opened(**lines(tmp_path, text))
    assert view.holds == "text"
    assert view.ids == ("1", "3")
    assert [view.read(position) for position in range(2)] == [("a\u2028b", "x"), ("ü", "")]
    assert (view.class_names, view.label(0)) == (None, None)


def test_the_keys_may_have_other_names(tmp_path: Path) -> None:
    view = opened(**lines(tmp_path, '{"q": "1+1", "a": "2"}', input="q", target="a"))
    assert view.holds == "text"
    assert view.read(0) == ("1+1", "2")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        pytest.param('{"input": "a"', "line 1: can't be read: JSONDecodeError", "", id="cut short"),
        pytest.param('{"input": "a", "target": "b"}\n[1]', "line 2: can't be read", "", id="a list"),
        pytest.param('{"target": "a"}', "no column 'input'; columns are target", "`input: COL", id="no input"),
        pytest.param(b"\xff\xfe{", "UnicodeDecodeError", "UTF-8", id="another encoding"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path: Path, text: str | bytes, message: str, hint: str) -> None:
    with refusing(DataError, message, "rows.jsonl", hint=hint):
        opened(**lines(tmp_path, text))


def test_values_are_those_of_the_line_whatever_the_other_lines_hold(tmp_path: Path) -> None:
    """The reader of JSON of `datasets` would make dates of texts, and 1.0 of 1."""
    text = '\ufeff{"input": "2024-01-01", "target": 1}\r\n\n{"input": "2024-01-02", "target": 2.5}\n'
    view = opened(**lines(tmp_path, text))
    assert view.ids == ("1", "3")
    assert [view.read(row) for row in range(2)] == [("2024-01-01", "1"), ("2024-01-02", "2.5")]
