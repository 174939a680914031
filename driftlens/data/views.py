"""Views: altered copies of calibration samples, made from a seed whenever they are read, never stored.

Expert and merged model read the same copy, so a copy need not keep its original's label. A copy depends on the seed,
its original
and, for some kinds, the task's other samples, but not on their order.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from driftlens.data.samples import SampleSet, drawing
from driftlens.utils.errors import DataError

if TYPE_CHECKING:
    from numpy.random import Generator
    from torch import Tensor

# Largest shift relative to an image's side; borders are mirrored.
_MARGIN = 3 / 32
_LIGHT = 0.2
# Share of a prompt's words replaced by words of other prompts.
_REPLACED = 0.3


def viewed(samples: SampleSet) -> SampleSet:
    """Append the first copies, second copies, ... to samples; return them unchanged without views.

    Raises:
        DataError: the kind of views does not fit the samples.
    """
    views = samples.views
    if views is None or not views.count:
        return samples
    original = replace(samples, views=None)
    count, kind = len(original), views.kind if views.kind != "auto" else _suitable(original)
    if kind != "crop" and count < 2:
        raise DataError(
            f"task {samples.task}: views of kind {kind} combine several samples, but it has one",
            hint="Add samples, or set views: none.",
        )
    identities, seed = original.identities, views.seed

    def random(place: int) -> Generator:
        return drawing(seed, f"view {place // count}/{samples.task}/{identities[place % count]}")

    copies = [f"{name}, view {number}" for number in range(1, 1 + views.count) for name in original.ids]
    every = replace(
        original,
        ids=(*original.ids, *copies),
        labels=None,
        picture=None,
        original=original,
    )
    if kind == "words":
        return _reworded(every, random)
    every = replace(every, load=(_cropped if kind == "crop" else _mixed)(original, random))
    # Fail now rather than during the calibration.
    every.load([count])
    return every


def _suitable(samples: SampleSet) -> str:
    """Return the kind of views that fits the samples."""
    if samples.texts is not None:
        return "words"
    sizes: list[int] = []
    _changed(lambda value: sizes.append(value.dim() if value.is_floating_point() else 0), samples.load([0]))
    return "crop" if 4 in sizes else "mix"


def _changed(change: Callable[..., Any], *inputs: Any) -> Any:
    """Apply `change` to the tensors of raw inputs of one structure."""
    sample = inputs[0]
    if isinstance(sample, Mapping):
        return {name: _changed(change, *(batch[name] for batch in inputs)) for name in sample}
    if isinstance(sample, list | tuple):
        return tuple(_changed(change, *parts) for parts in zip(*inputs, strict=True))
    return change(*inputs) if hasattr(sample, "is_floating_point") else sample


def _cropped(original: SampleSet, random: Callable[[int], Generator]) -> Callable[[Sequence[int]], Any]:
    """Return a reader of samples and copies: images [n, c, h, w], shifted, times 1 + u, plus v."""
    import torch

    count = len(original)

    def load(positions: Sequence[int]) -> Any:
        are_images = False

        def images(value: Tensor) -> Tensor:
            nonlocal are_images
            if value.dim() != 4 or not value.is_floating_point():
                return value
            are_images = True
            rows = [
                row if row_index < count else _moved(row, random(row_index))
                for row_index, row in zip(positions, value, strict=True)
            ]
            return torch.stack(rows)

        inputs = _changed(images, original.load([view % count for view in positions]))
        _require(are_images, original, "crop", "images [n, c, h, w]")
        return inputs

    return load


def _moved(image: Tensor, random: Generator) -> Tensor:
    from torch.nn.functional import pad

    down, right = (min(side - 1, max(1, round(side * _MARGIN))) for side in image.shape[-2:])
    wide = pad(image[None], (right, right, down, down), mode="reflect")[0]
    top, left = (int(random.integers(2 * most + 1)) for most in (down, right))
    scale, shift = random.uniform(-_LIGHT, _LIGHT, 2).tolist()
    return wide[..., top : top + image.shape[-2], left : left + image.shape[-1]] * (1 + scale) + shift


def _mixed(original: SampleSet, random: Callable[[int], Generator]) -> Callable[[Sequence[int]], Any]:
    """Return a reader of samples and copies: w times a sample + (1 - w) times another; integers are not mixed.

    w is drawn from [0.5, 1]."""
    count = len(original)
    # Partners are chosen in the order of identities, so that a copy does not depend on the samples' order.
    order = sorted(range(count), key=original.identities.__getitem__)
    ranks = {position: rank for rank, position in enumerate(order)}

    def load(positions: Sequence[int]) -> Any:
        import torch

        are_floats = False
        others, shares = list[int](), list[float]()
        for position in positions:
            source = position % count
            if position < count:
                others.append(source)
                shares.append(1.0)
            else:
                drawn = random(position)
                others.append(order[(ranks[source] + 1 + int(drawn.integers(count - 1))) % count])
                shares.append(float(drawn.uniform(0.5, 1)))
        is_copy = torch.tensor([position >= count for position in positions])

        def mixture(value: Tensor, other: Tensor) -> Tensor:
            nonlocal are_floats
            if not value.is_floating_point():
                return value
            if value.shape != other.shape:
                raise DataError(
                    f"task {original.task}: samples of shapes {list(value.shape[1:])} and {list(other.shape[1:])} "
                    "can't be mixed",
                    hint="Set another kind of views, or none.",
                )
            are_floats, side_by_side = True, (-1, *[1] * (value.dim() - 1))
            share = torch.tensor(shares, dtype=value.dtype).reshape(side_by_side)
            # Originals stay bit-identical; 1 * x + 0 * y would turn an infinite y into NaN.
            return torch.where(is_copy.reshape(side_by_side), share * value + (1 - share) * other, value)

        inputs = _changed(mixture, original.load([view % count for view in positions]), original.load(others))
        _require(are_floats, original, "mix", "floating-point inputs")
        return inputs

    return load


def _require(holds: bool, samples: SampleSet, kind: str, needed: str) -> None:
    if not holds:
        raise DataError(
            f"task {samples.task}: views of kind {kind} need {needed}",
            hint="Set another kind of views, or none.",
        )


def _beginning(texts: Sequence[str]) -> str:
    """Return the common beginning of all texts."""
    # The extremes of the sorted texts share the least.
    lowest, highest = min(texts), max(texts)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lowest, highest, strict=False))
    return "".join(letter for letter, _ in alike)


def _reworded(every: SampleSet, random: Callable[[int], Generator]) -> SampleSet:
    """Add copies of samples whose prompts have words replaced by words of the task's other prompts.

    What all prompts of the task begin and end with, and special tokens of the tokenizer, stay.
    """
    original, texts, read = every.original, every.texts, every.preprocess
    assert original is not None
    if texts is None or read is None:
        raise DataError(
            f"task {every.task}: views of kind words need texts",
            hint="Set another kind of views, or none.",
        )
    rows = [texts.read(position) for position in range(len(original))]
    questions = [row.input for row in rows]
    special = () if texts.reader is None else texts.reader.marks
    kept = re.compile("|".join([*map(re.escape, special), r"(\w+)"]))
    head = re.sub(r"\w+$", "", _beginning(questions))
    tail = re.sub(r"^\w+", "", _beginning([text[::-1] for text in questions])[::-1])
    middles = [slice(len(head), max(len(head), len(text) - len(tail))) for text in questions]
    words, ends = list[str](), dict[int, tuple[int, int]]()
    for position in sorted(range(len(questions)), key=original.identities.__getitem__):
        between = [match[1] for match in kept.finditer(questions[position][middles[position]]) if match[1]]
        ends[position] = len(words), len(words) + len(between)
        words += between

    def copy(place: int) -> Any:
        position, drawn = place % len(questions), random(place)
        text, middle, (start, stop) = questions[position], middles[position], ends[position]
        num_others = len(words) - (stop - start)

        def word(match: re.Match[str]) -> str:
            if not match[1] or not num_others or drawn.random() >= _REPLACED:
                return match[0]
            other = int(drawn.integers(num_others))
            return words[other if other < start else other + stop - start]

        changed = kept.sub(word, text[middle])
        return rows[position]._replace(input=text[: middle.start] + changed + text[middle.stop :])

    rows += [copy(place) for place in range(len(questions), len(every))]
    # The data's answers would belong to another question, so copies show none of them; an expert whose own
    # answers are shown answers the copies anew.
    anew = len(questions) if texts.shown == "target" else 0

    @functools.cache
    def shown_rows() -> list[Any]:
        """Return the rows with the answers that are shown."""
        silent = [row._replace(target="") for row in rows[anew:]]
        if texts.shown != "expert" or texts.answers is None:
            return [*rows[:anew], *silent]
        answers = texts.answers(silent)
        return [
            *rows[:anew],
            *(row._replace(target=answer) for row, answer in zip(silent, answers, strict=True)),
        ]

    return replace(
        every,
        load=lambda positions: read([shown_rows()[position] for position in positions]),
        texts=replace(texts, read=rows.__getitem__),
    )
