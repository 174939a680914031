"""Alignment of task vectors against numpy, and its laws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from driftlens.diagnostics.drift_columns import TaskVectorAlignment, alignment_rows, task_vector_cosine
from driftlens.models.chain import adapters
from tests.zoo.cases import CASES, Case, family
from tests.zoo.hand_made import token_batch
from tests.zoo.small import flan_t5


def test_sums_of_parts_are_the_whole(generator: torch.Generator) -> None:
    left, right = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    parts = TaskVectorAlignment.between(left[:15], right[:15]) + TaskVectorAlignment.between(left[15:], right[15:])
    for name, value in TaskVectorAlignment.between(left, right).values().items():
        assert parts.values()[name] == pytest.approx(value, rel=1e-12)


def test_values_by_hand() -> None:
    found = TaskVectorAlignment.between(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, -4.0, 5.0])).values()
    assert found["cos"] == pytest.approx(-7 / (5 * 50**0.5))
    assert found["norm_ratio"] == pytest.approx(5 / 50**0.5)
    assert found["sign_agreement"] == 0.5


def test_a_zero_vector_has_no_direction() -> None:
    assert TaskVectorAlignment.between(torch.zeros(3), torch.ones(3)).values() == {
        "cos": None,
        "norm_ratio": 0,
        "sign_agreement": None,
    }
    assert task_vector_cosine(torch.ones(3), torch.zeros(3)) is None


@pytest.mark.parametrize("name", ["open_clip_vit", "hf_clip_vit", "encoder_decoder"])
def test_backbone_row_is_the_cosine_of_all_parameters(name: str) -> None:
    models = family(CASES[name])
    rows = {(row["scope"], row["path"]): row for row in alignment_rows(models.pool, "a", "merged")}
    assert len(rows) == len(list(alignment_rows(models.pool, "a", "merged")))
    base, merged, expert = (
        np.concatenate([p.detach().numpy().ravel() for p in models.modules[m].parameters()])
        for m in ("base", "merged", "expert:a")
    )
    variant, wanted = merged - base, expert - base
    backbone = rows["backbone", ""]
    assert backbone["cos"] == pytest.approx(
        variant @ wanted / np.linalg.norm(variant) / np.linalg.norm(wanted), rel=1e-9
    )
    assert backbone["norm_ratio"] == pytest.approx(np.linalg.norm(variant) / np.linalg.norm(wanted), rel=1e-9)
    assert backbone["sign_agreement"] == pytest.approx(float(np.mean(variant * wanted > 0)), rel=1e-9)


def test_fused_attention_is_reported_by_its_parts() -> None:
    models = family(CASES["open_clip_vit"])
    rows = {row["path"]: row for row in alignment_rows(models.pool, "a", "merged") if row["scope"] == "module"}
    site = "transformer.resblocks.1.attn.k_proj"
    state = {name: module.state_dict() for name, module in models.modules.items()}
    key, width = "transformer.resblocks.1.attn.in_proj_", 32
    vectors = [
        torch.cat(
            [
                (state[m][key + part] - state["base"][key + part])[width : 2 * width].flatten()
                for part in ("weight", "bias")
            ]
        )
        for m in ("merged", "expert:a")
    ]
    assert rows[site]["cos"] == pytest.approx(task_vector_cosine(*vectors), rel=1e-12)
    assert not any(path.endswith("in_proj") for path in rows)


def test_the_experts_own_task_vector_aligns_with_itself() -> None:
    models = family(CASES["open_clip_vit"])
    *_, backbone = alignment_rows(models.pool, "a", "expert:a")
    assert (backbone["cos"], backbone["norm_ratio"], backbone["sign_agreement"]) == pytest.approx((1, 1, 1))


def test_a_group_is_all_its_modules_at_once_and_groups_are_the_backbone_and_its_head() -> None:
    chain = adapters["seq2seq"].chain
    models = family(Case(flan_t5, chain, lambda generator, n: token_batch(generator, n, targets=True)))
    rows = {row["path"]: row for row in alignment_rows(models.pool, "a", "merged") if row["scope"] == "group"}
    state = {name: module.state_dict() for name, module in models.modules.items()}

    def cosine(wanted: Callable[[str], bool]) -> float | None:
        vectors = [
            torch.cat([(state[m][key] - state["base"][key]).flatten() for key in state["base"] if wanted(key)])
            for m in ("merged", "expert:a")
        ]
        return task_vector_cosine(*vectors)

    def norm_of_block(key: str) -> bool:
        return "layer_norm" in key and "final_layer_norm" not in key

    assert rows["q"]["cos"] == pytest.approx(cosine(lambda key: key.endswith(".q.weight")), rel=1e-9)
    assert rows["down"]["cos"] == pytest.approx(cosine(lambda key: key.endswith(".wo.weight")), rel=1e-9)
    assert rows["norms"]["cos"] == pytest.approx(cosine(norm_of_block), rel=1e-9)
    assert rows["embeddings"]["cos"] == pytest.approx(cosine(lambda key: key == "shared.weight"), rel=1e-9)
    # The layer of the last norm is the head's, as in decoders.
    head = ("lm_head.weight", "decoder.final_layer_norm.weight")
    assert rows["head"]["cos"] == pytest.approx(cosine(lambda key: key in head), rel=1e-9)
    assert set(rows) == {"embeddings", *"qkvo", "gate", "up", "down", "norms", "head", "other"}
