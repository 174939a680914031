"""e = m + p at every boundary, on every kind of model, and against a slow reference."""

from __future__ import annotations

import math

import pytest
import torch

from driftlens.data.samples import Batch
from driftlens.engine.walk import LayerView, decompose, drift_columns, iter_final_features, walk
from driftlens.linalg.state import state_norms, subtract_states
from driftlens.models.chain import State
from tests.reference.drift import STEPS, drift_rows
from tests.zoo.cases import CASES, Family, family, pool_of


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest, device: torch.device) -> Family:
    return family(CASES[request.param], device=device)


def views(models: Family, variant: str = "merged") -> list[LayerView]:
    with torch.no_grad():
        return list(walk(models.pool, "a", [variant], models.batches))


def total(state: State) -> float:
    return float(state_norms(state).sum())


def test_mismatch_and_propagation_sum_to_the_drift(models: Family, rounding: float) -> None:
    seen = views(models)
    assert {view.layer.index for view in seen} == set(range(1, len(models.chain.layers) + 1))
    for view in seen:
        split = decompose(view)
        parts = {name: split.local_mismatch[name] + split.propagation[name] for name in split.drift}
        assert total(subtract_states(parts, split.drift)) <= rounding * total(split.drift)


def test_the_stem_inherits_nothing(models: Family) -> None:
    for view in views(models):
        if view.layer.role == "stem":
            assert total(decompose(view).propagation) == 0


def test_an_expert_against_itself_has_no_drift(models: Family) -> None:
    for view in views(models, variant="expert:a"):
        split = decompose(view)
        assert [total(split.drift), total(split.local_mismatch), total(split.propagation)] == [0, 0, 0]


def test_drift_is_what_the_library_itself_gives(models: Family) -> None:
    """The walk's states equal those of ordinary forward passes of the native modules, boundary by boundary."""
    first = models.batches[0]
    native = {name: models.chain.library_states(models.modules[name], first.inputs) for name in ("merged", "expert:a")}
    checked = 0
    for view in views(models):
        if view.start == 0:
            boundary = view.layer.index - 1
            for state, name in ((view.merged_out, "merged"), (view.expert_out, "expert:a")):
                want = native[name][boundary]
                assert state.keys() == want.keys()
                # eager attention of transformers computes its softmax in float32
                assert total(subtract_states(state, want)) <= 1e-6 * total(want)
                checked += 1
    assert checked == 2 * len(models.chain.layers)


def test_with_one_model_the_walk_is_its_plain_forward(models: Family) -> None:
    with torch.no_grad():
        last = [view for view in walk(models.pool, "a", ["merged"], models.batches) if view.layer.role == "head"]
        features = list(iter_final_features(models.pool, "merged", models.batches))
    assert [start for start, _ in features] == [view.start for view in last]
    for (_, plain), view in zip(features, last, strict=True):
        assert torch.equal(plain, view.merged_out[view.layer.stream])


@pytest.mark.parametrize("name", CASES)
def test_batch_size_does_not_matter(name: str) -> None:
    by_size = {}
    for size in (1, 4):
        models = family(CASES[name], batch_size=4)
        if size == 1:
            models = Family(models.pool, models.modules, [part for batch in models.batches for part in singles(batch)])
        rows: dict[int, list[torch.Tensor]] = {}
        for view in views(models):
            rows.setdefault(view.layer.index, []).append(drift_columns(view, "mean")["drift_l2"])
        by_size[size] = {index: torch.cat(columns) for index, columns in rows.items()}
    for index, whole in by_size[4].items():
        torch.testing.assert_close(by_size[1][index], whole, rtol=1e-9, atol=1e-12)


def singles(batch: Batch) -> list[Batch]:
    def pick(inputs: object, i: int) -> object:
        if isinstance(inputs, dict):
            return {key: value[i : i + 1] for key, value in inputs.items()}
        return inputs[i : i + 1]

    return [
        Batch(batch.start + i, batch.start + i + 1, pick(batch.inputs, i)) for i in range(batch.stop - batch.start)
    ]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", ["several_samples", "one_sample"])
def test_columns_agree_with_a_slow_reference(name: str, shape: str) -> None:
    models = family(CASES[name], n=1 if shape == "one_sample" else 3, batch_size=2)
    steps = STEPS[name]
    x = torch.cat([batch.inputs for batch in models.batches])
    reference = drift_rows(steps(models.modules["merged"]), steps(models.modules["expert:a"]), x)
    for view in views(models):
        columns = drift_columns(view, "cls")
        for offset in range(view.stop - view.start):
            row = reference[view.start + offset][view.layer.index - 1]
            wanted = {
                "drift_l2": row.drift.norm(),
                "expert_l2": row.expert.norm(),
                "cos": torch.cosine_similarity(row.expert + row.drift, row.expert, dim=0),
                "mismatch_l2": row.mismatch.norm(),
                "propagation_l2": row.propagation.norm(),
                "mixed": 2 * row.mismatch @ row.propagation / columns["unit"][offset] ** 2,
                "state_in": row.state_in,
                "state_propagation": row.state_propagation,
                "state_mismatch": row.state_mismatch,
            }
            for column, value in wanted.items():
                assert math.isclose(float(columns[column][offset]), float(value), rel_tol=1e-6, abs_tol=1e-7), column


def test_one_block_and_one_token_are_enough(rounding: float) -> None:
    from open_clip.transformer import VisionTransformer

    from driftlens.models.chain import adapters
    from tests.zoo.cases import Case, pixels
    from tests.zoo.small import scrambled

    case = Case(
        lambda: scrambled(lambda: VisionTransformer(4, 4, 8, 1, 2, 2.0, output_dim=3)),
        adapters["open_clip_vit"].chain,
        pixels(4),
    )
    models = family(case, n=1)
    assert len(models.chain.layers) == 3
    for view in views(models):
        split = decompose(view)
        parts = {name: split.local_mismatch[name] + split.propagation[name] for name in split.drift}
        assert total(split.drift) > 0
        assert total(subtract_states(parts, split.drift)) <= rounding * total(split.drift)
    assert pool_of(case, models.modules).chain.blocks[0].path == "transformer.resblocks.0"
