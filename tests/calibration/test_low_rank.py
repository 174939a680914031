"""Low-rank corrections against ridge regression of reduced rank, done by hooks on the library's own models."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from driftlens.calibration.low_rank import LowRankCorrections
from driftlens.engine.attached import InSites, attachment_tensors, attachments_from
from driftlens.linalg.joint_ridge import BIAS_INPUT
from tests.calibration.helpers import TASKS, final_features, subject, trained

STEPS = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ""),
    (("self_attn.out_proj",), "layer_norm1"),
    (("mlp.fc1",), ""),
    (("mlp.fc2",), "layer_norm2"),
)
"""Modules of a block that read the same rows, and the norm that reads what their outputs are added to."""


def heard(block: nn.Module, model: nn.Module, pixels: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """What modules read, and under `name.` what they make of it, rows of all tokens."""
    found: dict[str, Tensor] = {}

    def keep(name: str, inputs: Tensor, output: Tensor) -> None:
        found[name], found[f"{name}."] = inputs.flatten(0, 1), output.flatten(0, 1)

    hooks = [
        block.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: keep(name, inputs[0], output)
        )
        for name in names
    ]
    final_features(model, pixels)
    for hook in hooks:
        hook.remove()
    return found


def update(x: Tensor, lacking: Tensor, rank: int, lam: float) -> Tensor:
    """Least squares of rows and of the ridge below them, projected on the first directions of what it fits, [o, k]."""
    width = x.shape[1] - 1
    ridge = (lam * torch.linalg.matrix_norm(x[:, :width].T @ x[:, :width])).sqrt()
    rows = torch.cat([x, ridge * torch.eye(width + 1, dtype=x.dtype)])
    wanted = torch.cat([lacking, lacking.new_zeros(width + 1, lacking.shape[1])])
    solved = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    directions = torch.linalg.svd(rows @ solved, full_matrices=False).Vh[:rank]
    return (solved @ directions.T @ directions).T


def test_it_is_regression_of_reduced_rank_module_by_module_in_the_librarys_own_model() -> None:
    models, rank, lam, task = subject("hf_clip_vit", n=4), 2, 0.03, TASKS[1]
    found = trained(models, LowRankCorrections(rank=rank, lam=lam))
    merged, expert = (models.modules[variant].double() for variant in ("merged", f"expert:{task}"))
    assert {at for own, at in found if own == task} == {layer.index for layer in models.pool.chain.blocks}
    with torch.no_grad():
        for layer in models.pool.chain.blocks:
            own, theirs = merged.get_submodule(layer.path), expert.get_submodule(layer.path)
            parts = {part.site: part for part in found[task, layer.index].parts}
            for names, norm in STEPS:
                every = [*names, *([norm] if norm else [])]
                student, teacher = (
                    heard(block, model, models.inputs, every)
                    for block, model in ((own, merged), (theirs, expert))
                )
                for name in names:
                    x, lacking = student[name], teacher[f"{name}."] - student[f"{name}."]
                    lacking = lacking + (teacher[norm] - student[norm] if norm else 0)
                    constant = x.new_full((len(x), 1), BIAS_INPUT)
                    wanted = update(torch.cat([x, constant], dim=1), lacking, rank, lam)
                    part, module = parts[name], own.get_submodule(name)
                    torch.testing.assert_close(part.up @ part.down, wanted[:, :-1], rtol=1e-6, atol=1e-9)
                    torch.testing.assert_close(
                        part.up @ part.shift, BIAS_INPUT * wanted[:, -1], rtol=1e-6, atol=1e-8
                    )
                    module.weight += wanted[:, :-1]
                    module.bias += BIAS_INPUT * wanted[:, -1]


@pytest.mark.parametrize(("name", "count"), [("hf_clip_vit", 6), ("open_clip_vit", 2), ("llama", 7)])
def test_the_librarys_own_forward_with_corrections_is_the_chains(name: str, count: int) -> None:
    """Torch's attention does not run its projections as modules: there only the perceptron's two are corrected."""
    models = subject(name, n=3)
    found = trained(models, LowRankCorrections(rank=2))
    again = attachments_from(attachment_tensors(found).items(), LowRankCorrections.attachment)
    pool, task = models.pool, TASKS[0]
    pool.add("calibrated:corrected", pool.source("merged"), again)
    (batch,) = models.batches()
    plain, states = (
        pool.library_states(model, batch.inputs, task) for model in ("merged", "calibrated:corrected")
    )
    state, side = pool.begun(batch.inputs)
    for layer, theirs, before in zip(pool.chain.layers, states, plain, strict=True):
        state = pool.layer_map("calibrated:corrected", layer, task)(state, side)
        torch.testing.assert_close(theirs[layer.stream], state[layer.stream], rtol=1e-9, atol=1e-9)
        assert torch.equal(theirs[layer.stream], before[layer.stream]) == (layer.index == 1)
    assert again.keys() == found.keys()
    for parts in found.values():
        assert isinstance(parts, InSites) and len(parts.parts) == count
