"""Layers read ahead are those that are asked for, and nothing else about a walk changes.

Where no GPU is at hand, streams are stood in for: what is read, when, and what is made to wait is the same.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import NumericsError
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.sources import TensorsSource, module_source
from driftlens.engine.pool import ReadAhead
from driftlens.engine.walk import walk
from tests.calibration.helpers import layers_of, subject, updates_of
from tests.zoo.cases import CASES, Family, family, perturbed


class Stream:
    """In the place of a stream: knows for which others it has waited."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream on which everything is computed."""
    one = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: one)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    recorded.clear()
    return one


recorded: list[tuple[Tensor, object]] = []


class Counted(ReadAhead):
    """Knows what was asked for, and whether it was on its way."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: list[tuple[Any, bool]] = []

    def take(self, key: Any) -> dict[str, Tensor] | None:
        found = super().take(key)
        self.asked.append((key, found is not None))
        return found


def drifts(models: Family) -> list[Tensor]:
    views = walk(models.pool, "a", ["merged"], models.batches)
    return [view.merged_out[view.layer.stream] - view.expert_out[view.layer.stream] for view in views]


def test_a_walk_reads_the_next_layer_while_one_is_computed(current: Stream) -> None:
    plain, ahead = (family(CASES["open_clip_vit"]) for _ in range(2))
    reader = ahead.pool._ahead = Counted()
    for found, expected in zip(drifts(ahead), drifts(plain), strict=True):
        assert torch.equal(found, expected)
    assert [was_coming for (_, layer), was_coming in reader.asked] == [
        layer > 1 for (_, layer), _ in reader.asked
    ]
    assert {key for key, _ in reader.asked} == {
        (model, layer.index) for model in ("merged", "expert:a") for layer in ahead.chain.layers
    }
    assert not reader._coming  # and nothing is read that nobody asks for
    assert current.waited == [reader._stream] * sum(coming for _, coming in reader.asked)
    assert recorded and all(stream is current for _, stream in recorded)


@pytest.mark.parametrize(
    "calibrator", [FeatCal(), ResidualCal(weights="uniform")], ids=["featcal", "residual"]
)
def test_a_calibration_reads_the_next_expert_while_one_is_computed(
    current: Stream, calibrator: Calibrator
) -> None:
    plain, ahead = subject("open_clip_vit"), subject("open_clip_vit")
    reader = ahead.pool._ahead = Counted()
    found, expected = (updates_of(layers_of(models, calibrator)) for models in (ahead, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    first_reads: dict[Any, bool] = {}
    for key, was_coming in reader.asked:
        first_reads.setdefault(key, was_coming)
    experts = [key for key in first_reads if key[0].startswith("expert:")]
    assert [first_reads[key] for key in experts] == [False] + [True] * (len(experts) - 1)
    assert not reader._coming


def test_what_is_wrong_with_weights_read_ahead_is_said_when_they_are_asked_for(current: Stream) -> None:
    models = family(CASES["open_clip_vit"])
    state = dict(models.modules["expert:a"].state_dict())
    key = models.chain.layers[2].parameters[next(iter(models.chain.layers[2].parameters))].key
    state[key] = state[key].clone().fill_(float("nan"))
    models.pool.add("expert:a", TensorsSource("a.safetensors", state))
    models.pool._ahead = Counted()
    with pytest.raises(NumericsError, match=r"a\.safetensors.*" + key):
        drifts(models)


def test_a_model_in_the_place_of_another_is_not_the_one_read_ahead(current: Stream) -> None:
    models = family(CASES["open_clip_vit"])
    models.pool._ahead = Counted()
    layer = models.chain.layers[1]
    models.pool.expect(["merged"], layer.index)
    before = models.pool._read("merged", layer)
    other = perturbed(models.modules["merged"], seed=9)
    models.pool.add("merged", module_source(other, "other"))
    found, wanted = models.pool.parameters("merged", layer), models.pool._read("merged", layer)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(torch.equal(before[name], wanted[name]) for name in wanted)
