"""Views: copies of samples by seed alone, and what becomes of pixels, numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.config.data import Views
from driftlens.config.requests import CalibrationRequest
from driftlens.config.spec import load_spec
from driftlens.data import altered as views_of
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet, SampleTexts, select_samples
from driftlens.models.texts import TextProcessor, TextSample
from driftlens.utils.errors import DataError, SpecError
from tests.calibration.helpers import TASKS, calibrated, subject
from tests.specs import minimal, refused
from tests.zoo.tokenizers import word_tokenizer

QUESTIONS = [f"Review: the {noun} was {word} indeed. Verdict:" for noun, word in zip("abcdef", "uvwxyz", strict=True)]


def samples(inputs: Any, kind: str = "auto", copies: int = 2, **more: Any) -> SampleSet:
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)

    def load(positions: Sequence[int]) -> Any:
        at = list(positions)
        return {name: value[at] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[at]

    views = Views(kind=kind, copies=copies)
    return SampleSet("t", "calibration", tuple(map(str, range(count))), None, load, 4, views=views, **more)


def texts(questions: Sequence[str], *, shown: Any = "target") -> SampleSet:
    rows = [TextSample(question, f" answer {at}") for at, question in enumerate(questions)]
    held = SampleTexts(rows.__getitem__, None, " {target}", shown)
    shows: Any = lambda given: [[*row] for row in given]  # noqa: E731
    ids = tuple(map(str, range(len(rows))))
    return SampleSet(
        "t",
        "calibration",
        ids,
        None,
        list,
        source=lambda: "",
        texts=held,
        preprocess=shows,
        views=Views(kind="words"),
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("crop", (5, 3, 16, 16)), ("mix", (5, 3, 16, 16)), ("mix", (5, 7)), ("auto", (5, 3, 16, 1))],
)
def test_copies_follow_seed_and_content_alone(generator: torch.Generator, kind: str, shape: tuple[int, ...]) -> None:
    """Not the order of samples, batches, or which are read; originals stay bit for bit, and every copy differs."""
    inputs = torch.randn(*shape, generator=generator)
    plain, order = samples(inputs, kind), [3, 0, 4, 1, 2]
    every, turned = append_views(plain), append_views(select_samples(plain, order))
    whole = every.load(range(15))
    assert torch.equal(whole[:5], inputs) and every.ids[5:7] == ("0, view 1", "1, view 1")
    assert torch.equal(torch.cat([batch.inputs for batch in every.batches()]), whole)
    assert [digest for batch in every.batches() for digest in batch.copied] == [*plain.digests] * 3
    assert torch.equal(turned.load(range(15)), torch.cat([whole[:5][order], whole[5:10][order], whole[10:][order]]))
    assert len({value.flatten()[0].item() for value in whole}) == 15
    other = append_views(replace(plain, views=Views(kind=kind, copies=2, seed=1))).load(range(5, 15))
    assert not torch.equal(other, whole[5:])


def test_crops_move_by_a_margin_and_change_the_light(generator: torch.Generator) -> None:
    """Every copy is a window of the image mirrored at its borders, times 1 + u, plus v, both from -0.2 to 0.2."""
    inputs = torch.rand(4, 2, 32, 32, generator=generator, dtype=torch.float64)
    every = append_views(samples(inputs, "crop", copies=3))
    mirrored = torch.nn.functional.pad(inputs, (3, 3, 3, 3), mode="reflect")
    moves = set()
    for at, copy in enumerate(every.load(range(4, 16))):
        fits = {}
        for top, left in torch.cartesian_prod(torch.arange(7), torch.arange(7)).tolist():
            window = mirrored[at % 4, :, top : top + 32, left : left + 32].flatten()
            line = torch.linalg.lstsq(torch.stack([window, torch.ones_like(window)], 1), copy.reshape(-1, 1))
            scale, shift = line.solution[:, 0].tolist()
            fits[top, left] = float((scale * window + shift - copy.flatten()).norm()), scale, shift
        (off, scale, shift), move = min((fit, move) for move, fit in fits.items())
        moves.add(move)
        assert off < 1e-9 and abs(scale - 1) <= 0.2 and abs(shift) <= 0.2
    assert len(moves) > 6


def test_mixtures_are_of_two_samples_and_leave_whole_numbers(generator: torch.Generator) -> None:
    inputs = {"x": torch.eye(5, dtype=torch.float64), "mask": torch.arange(5)}
    found = append_views(samples(inputs)).load(range(5, 15))
    assert torch.equal(found["mask"], torch.arange(5).repeat(2))
    largest, second = found["x"].topk(2, dim=1).values.mT
    assert torch.allclose(largest + second, torch.ones(10, dtype=torch.float64)) and bool((largest >= 0.5).all())
    assert torch.equal(found["x"].argmax(dim=1), torch.arange(5).repeat(2))


def test_words_are_those_of_other_prompts_and_templates_and_answers_stay() -> None:
    every = append_views(texts(QUESTIONS))
    rows = every.load(range(24))
    assert rows[:6] == [[question, f" answer {at}"] for at, question in enumerate(QUESTIONS)]
    changed = 0
    for at, (question, answer) in enumerate(rows[6:]):
        assert answer == "" and question == every.texts.read(6 + at).input  # type: ignore[union-attr]
        assert question.startswith("Review: the ") and question.endswith(" indeed. Verdict:")
        noun, was, word = question.removeprefix("Review: the ").removesuffix(" indeed. Verdict:").split()
        own = QUESTIONS[at % 6].split()
        assert {noun, was, word} <= {*"abcdef", *"uvwxyz", "was"}
        changed += (noun, was, word) != (own[2], own[3], own[4])
    assert 6 < changed < 18  # two of three words are often replaced by others: 0.66 of 18
    hidden = append_views(replace(texts(QUESTIONS), texts=replace(texts(QUESTIONS).texts, shown="none")))  # type: ignore[type-var]
    assert {answer for _, answer in hidden.load(range(24))} == {""}


def test_special_tokens_are_no_words() -> None:
    reader = TextProcessor(word_tokenizer(words=["one", "two", "three", "mark"]))
    marks = reader.special_tokens
    assert marks
    plain = texts([f"one {marks[0]} two", f"three {marks[0]} mark"])
    every = append_views(
        replace(plain, views=Views(kind="words", copies=31), texts=replace(plain.texts, reader=reader))
    )  # type: ignore[type-var]
    assert every.texts is not None
    assert all(every.texts.read(at).input.split()[1] == marks[0] for at in range(64))


@pytest.mark.parametrize(("shown", "told"), [("target", 6), ("expert", 0), ("none", 24)])
def test_experts_answer_views_anew(shown: str, told: int) -> None:
    """Not before samples are read, and once; of the data's own answers those of originals stay."""
    plain, asked = texts(QUESTIONS, shown=shown), list[list[str]]()

    def answers(rows: Sequence[Any]) -> list[str]:
        asked.append([row.input for row in rows])
        return [f" to {row.input}" for row in rows]

    assert plain.texts is not None
    every = append_views(replace(plain, texts=replace(plain.texts, answers=answers)))
    assert not asked
    rows = every.load(range(24))
    assert every.load([7])[0] == rows[7] and [len(of) for of in asked] == [24] * (shown == "expert")
    for at, (question, answer) in enumerate(rows):
        own = f" answer {at}" if shown == "target" and at < told else ""
        assert answer == (own if at < told or shown != "expert" else f" to {question}")


def _tensor(*shape: int) -> Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (samples(_tensor(1, 4), "mix"), "but it has one"),
        (samples(torch.arange(6).reshape(3, 2), "mix"), "floating-point inputs"),
        (samples(_tensor(3, 4), "crop"), "images"),
        (samples(_tensor(3, 4), "words"), "texts"),
    ],
)
def test_views_that_can_not_be_made_are_refused(plain: SampleSet, says: str) -> None:
    with pytest.raises(DataError, match=says):
        append_views(plain)


@pytest.mark.parametrize("asked", [0, 1000, "crop:0", "crop:1000", "", "swirl", "crop:3:x", "-1", True])
def test_odd_views_are_refused(asked: Any) -> None:
    with pytest.raises(SpecError, match="views"):
        CalibrationRequest(name="a", views=asked)
    data = {**minimal()["data"], "defaults": {"views": asked}}
    assert "data.defaults.views" in str(refused(minimal(data=data)))


@pytest.mark.parametrize(
    ("asked", "views"),
    [
        (2, Views(copies=2)),
        ("crop", Views(kind="crop")),
        ("mix:5", Views(kind="mix", copies=5)),
        ("words:2:7", Views(kind="words", copies=2, seed=7)),
        ("none", Views(kind="none")),
        ({"copies": 3}, Views()),
    ],
)
def test_views_are_said_in_words_or_by_their_parts(asked: Any, views: Views) -> None:
    request = CalibrationRequest(name="a", views=asked)
    assert request.views == views
    [word] = [word for word in request.to_cli_args() if word.startswith("--views=")]
    assert CalibrationRequest(name="a", views=word.removeprefix("--views=")).views == views
    data = {**minimal()["data"], "defaults": {"views": asked}}
    assert load_spec(minimal(data=data)).data.defaults.views == views


@pytest.mark.parametrize("method", [FeatCal(), ResidualCal(folds=2, weights="uniform")])
def test_views_that_change_nothing_count_for_nothing(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views_of, "_shift_and_relight", lambda image, random: image)
    models = subject("hf_clip_vit", n=4)
    plain = replace(samples(models.inputs, "crop", copies=1), views=None)
    one, two = (
        calibrated(models, method, parts=dict.fromkeys(TASKS, of))
        for of in (plain, replace(plain, views=Views(kind="crop", copies=1)))
    )
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-9, atol=1e-11)
