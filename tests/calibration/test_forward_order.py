"""The walk that calibrates: what it must not depend on, what it leaves alone, and how it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibrationProgress
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.utils.errors import Cancelled, DataError, NumericsError, SingularGramError, SpecError
from tests.calibration.helpers import (
    Subject,
    batched,
    calibrated,
    context,
    given,
    layers_of,
    subject,
    updates_of,
)

Parameters = dict[tuple[int, str], Tensor]


@pytest.fixture(scope="module")
def models() -> Subject:
    return subject("open_clip_vit")


@pytest.fixture(scope="module")
def plain(models: Subject) -> Parameters:
    """The uninterrupted calibration with the default settings, all in one batch."""
    return calibrated(models, FeatCal())


def largest_difference(left: Parameters, right: Parameters) -> float:
    assert left.keys() == right.keys()
    return max(float((left[key] - right[key]).norm() / right[key].norm()) for key in right)


# --- what doesn't matter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_batch_size_does_not_matter(models: Subject, plain: Parameters, size: int) -> None:
    assert largest_difference(calibrated(models, FeatCal(), parts=models.samples(size)), plain) < 1e-10


def test_the_order_of_tasks_does_not_matter(models: Subject, plain: Parameters) -> None:
    backwards = dict(reversed(models.samples().items()))
    assert largest_difference(calibrated(models, FeatCal(), parts=backwards), plain) == 0


def test_the_order_of_samples_does_not_matter(models: Subject, plain: Parameters) -> None:
    shuffled = models.inputs[torch.tensor([2, 0, 3, 1])]
    parts = {task: given(batched(shuffled, 4)) for task in "ab"}
    assert largest_difference(calibrated(models, FeatCal(), parts=parts), plain) < 1e-10


def test_samples_given_twice_change_nothing(models: Subject, plain: Parameters) -> None:
    twice = torch.cat([models.inputs, models.inputs])
    parts = {"a": given(batched(twice, 4)), "b": given(models.batches())}
    assert largest_difference(calibrated(models, FeatCal(), parts=parts), plain) < 1e-10


@pytest.mark.parametrize("name", ["open_clip_vit", "sequential", "t5"])
def test_features_on_disk_give_the_same(name: str, tmp_path: Path) -> None:
    """In `sequential` a site reads a block's input itself, which lies in the file that the output replaces.

    Some processors round products by where in memory their factors begin.
    """
    models, seen = subject(name), set()

    def watch(now: CalibrationProgress) -> None:
        seen.update(file.name for file in (tmp_path / "spill").glob("*"))

    spilled = calibrated(models, FeatCal(), feature_budget=1, spill=tmp_path / "spill", on_step=watch)
    assert largest_difference(spilled, calibrated(models, FeatCal())) < 1e-13
    assert len(seen) == 4  # two tasks, expert and merged
    assert not (tmp_path / "spill").exists()


def test_objectives_are_left_out_on_request_and_change_no_weight(models: Subject, plain: Parameters) -> None:
    layers = layers_of(models, FeatCal(), objectives=False)
    assert largest_difference(updates_of(layers), plain) < 1e-10
    linear = [r for layer in layers for r in layer.reports if r.kind == "linear"]
    assert {(r.objective_before, r.objective_after) for r in linear} == {(None, None)}


def recast(models: Subject, dtype: torch.dtype, stored: torch.dtype) -> ModelPool:
    """The models stored in one dtype and computed in another."""
    return ModelPool(
        models.pool.chain,
        models.modules["base"],
        {
            name: InMemorySource(name, {k: v.to(stored) for k, v in module.state_dict().items()})
            for name, module in models.modules.items()
        },
        device=models.pool.device,
        dtype=dtype,
    )


def test_float32_features_and_float32_solves_come_close_to_float64(models: Subject, plain: Parameters) -> None:
    pool = recast(models, torch.float32, torch.float64)
    weights = {key for key in plain if key[1].endswith("weight")}
    for solve_dtype in ("float64", "float32"):
        found = calibrated(models, FeatCal(solve_dtype=solve_dtype), pool=pool)
        assert {value.dtype for value in found.values()} == {torch.float32}
        near = {key: found[key].double() for key in weights}
        assert largest_difference(near, {key: plain[key] for key in weights}) < 1e-5


def test_later_layers_see_what_a_half_precision_checkpoint_can_hold(models: Subject) -> None:
    pool = recast(models, torch.float64, torch.float16)
    layers = layers_of(models, FeatCal(), pool=pool)
    for value in updates_of(layers).values():
        assert torch.equal(value, value.half().double())
    # Resuming from what was saved gives bitwise the same, which it would not from unrounded parameters.
    saved = {layer.layer: {k: v.half() for k, v in layer.updates.items()} for layer in layers[:-1]}
    (rest,) = layers_of(models, FeatCal(), pool=pool, done=saved)
    assert all(torch.equal(value, layers[-1].updates[key]) for key, value in rest.updates.items())


# --- what is left alone -------------------------------------------------------------------------------------------


def test_nothing_of_the_models_is_modified(models: Subject) -> None:
    before = {n: {k: v.clone() for k, v in m.state_dict().items()} for n, m in models.modules.items()}
    calibrated(models, FeatCal())
    for name, module in models.modules.items():
        assert all(torch.equal(value, before[name][key]) for key, value in module.state_dict().items())
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_only_what_is_asked_for_is_updated(models: Subject) -> None:
    layers = layers_of(models, FeatCal(update=("bias",)), sites=select_sites(models.pool.chain, sites=["*.0.mlp.*"]))
    assert [layer.layer for layer in layers] == [2]
    assert set(layers[0].updates) == {"mlp.c_fc.bias", "mlp.c_proj.bias"}
    assert {r.site for r in layers[0].reports} == {
        "transformer.resblocks.0.mlp.c_fc",
        "transformer.resblocks.0.mlp.c_proj",
    }
    assert {r.weight_change for r in layers[0].reports} == {0.0}


# --- interruptions ------------------------------------------------------------------------------------------------


def test_a_calibration_goes_on_bitwise_where_it_was_interrupted(models: Subject, plain: Parameters) -> None:
    finished: dict[int, dict[str, Tensor]] = {}

    def cancel(now: CalibrationProgress) -> None:
        if now.layer == 4:
            raise Cancelled("stop")

    with pytest.raises(Cancelled):
        for layer in FeatCal().calibrate(context(models, on_step=cancel)):
            finished[layer.layer] = dict(layer.updates)
    assert list(finished) == [2, 3]
    rest = FeatCal().calibrate(context(models, done=finished))
    resumed = {(index, name): v for index, new in finished.items() for name, v in new.items()}
    resumed |= updates_of(rest)
    assert largest_difference(resumed, plain) == 0


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
def test_nothing_is_left_on_disk_by_a_walk_that_does_not_finish(models: Subject, tmp_path: Path, how: str) -> None:
    def cancel(now: CalibrationProgress) -> None:
        if how == "cancelled" and now.layer == 3:
            raise Cancelled("stop")

    folder = tmp_path / "spill"
    layers: Any = FeatCal().calibrate(context(models, feature_budget=1, spill=folder, on_step=cancel))
    next(layers)
    assert list(folder.iterdir())
    if how == "cancelled":
        with pytest.raises(Cancelled):
            next(layers)
    else:
        layers.close()
    assert not folder.exists()


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_task_without_samples_is_refused_by_name(models: Subject) -> None:
    with pytest.raises(DataError, match="'b' has no samples"):
        calibrated(models, FeatCal(), parts={"a": given(models.batches()), "b": given([])})


def test_features_that_are_not_finite_are_refused_with_layer_task_and_sample(models: Subject) -> None:
    inputs = models.inputs.clone()
    inputs[2, 0, 0, 0] = float("nan")
    ids = ["zero.png", "one.png", "two.png"]
    parts = {"a": given(models.batches()), "b": InMemoryBatches(lambda: batched(inputs, 3), ids)}
    with pytest.raises(NumericsError, match=r"layer 1 \(conv1\), task 'b', first in sample 'two.png'") as caught:
        calibrated(models, FeatCal(), parts=parts)
    assert caught.value.context["task"] == "b" and caught.value.context["layer"] == 1


def test_fewer_rows_than_inputs_without_a_ridge_are_refused_with_the_sites(models: Subject) -> None:
    with pytest.raises(SingularGramError, match=r"layer 2, transformer.resblocks.0.mlp.c_proj: gram is") as caught:
        layers_of(
            models,
            FeatCal(lam=0.0),
            parts={"a": given([Batch(0, 1, models.inputs[:1])])},
            sites={2: ("mlp.c_proj",)},
        )
    assert "more samples" in caught.value.hint and caught.value.context["smallest_eigenvalue"] < 1e-12


def test_bad_settings_are_refused_before_anything_is_read(models: Subject) -> None:
    def never() -> list[Batch]:
        raise AssertionError("samples were read")

    parts = {"a": InMemoryBatches(never)}
    with pytest.raises(SpecError, match="alpha is 2"):
        FeatCal(alpha=2).calibrate(context(models, parts=parts))
    with pytest.raises(SpecError, match="there is no base"):
        FeatCal().calibrate(context(models, parts=parts, base=None))


def test_token_weights_the_architecture_does_not_know_are_refused() -> None:
    with pytest.raises(SpecError, match="no token weights called 'cls_emphasis'"):
        calibrated(subject("sequential"), FeatCal(last_block_tokens="cls_emphasis"))
