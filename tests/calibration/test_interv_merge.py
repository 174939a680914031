"""IntervMerge against its equations, as hooks on the attention of the library's own models."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError
from driftlens.calibration.descent import uniform
from driftlens.calibration.interv_merge import Edit, IntervMerge
from driftlens.calibration.react import Linear
from driftlens.engine.attached import attachment_tensors, attachments_from
from driftlens.models.chain import Layer
from tests.calibration.helpers import TASKS, attention_edited, final_features, subject, trained

ATTENTION = {"hf_clip_vit": "self_attn", "open_clip_vit": "attn", "llama": "self_attn"}


def plain(source: nn.Linear, project: nn.Linear, *, first: bool) -> Callable[[Tensor], Tensor]:
    """h + W2' (W1 h + b1 - W2 h - b2), sample by sample and token by token."""

    def edit(output: Tensor) -> Tensor:
        rows = []
        for sample in output:
            tokens = list(sample)
            for at in range(1 if first else len(tokens)):
                h = tokens[at]
                tokens[at] = h + project.weight.T @ (source(h) - project(h))
            rows.append(torch.stack(tokens))
        return torch.stack(rows)

    return edit


@pytest.mark.parametrize("name", ATTENTION)
def test_it_is_what_plain_modules_learn_behind_the_librarys_own_attention(name: str) -> None:
    """All samples at once; of images the class token alone is edited, of texts every token."""
    models, steps, rank, task = subject(name, n=4), 3, 2, TASKS[1]
    found = trained(models, IntervMerge(rank=rank, steps=steps, batch=4))
    blocks, first = models.pool.chain.blocks, name != "llama"
    merged, expert = (models.modules[variant].double() for variant in ("merged", f"expert:{task}"))
    last = len(models.pool.chain.layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{last} {task}".encode()))
    pairs: list[tuple[nn.Linear, nn.Linear]] = []
    for layer in blocks:
        attention = merged.get_submodule(f"{layer.path}.{ATTENTION[name]}")
        width = next(
            value for key, value in attention.named_parameters() if "o_proj" in key or "out_proj" in key
        )
        made = nn.Linear(len(width), rank).double(), nn.Linear(len(width), rank).double()
        with torch.no_grad():
            for module in made:
                module.weight.copy_(uniform(rank, len(width), generator))
                module.bias.copy_(uniform(1, rank, generator, len(width))[0])
        attention.register_forward_hook(attention_edited(plain(*made, first=first)))
        pairs.append(made)
    with torch.no_grad():
        wanted = final_features(expert, models.inputs)
    leaves = [leaf for pair in pairs for module in pair for leaf in module.parameters()]
    optimiser = torch.optim.Adam(leaves, lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.l1_loss(final_features(merged, models.inputs), wanted).backward()
        optimiser.step()
    assert {at for own, at in found if own == task} == {layer.index for layer in blocks}
    for layer, (source, project) in zip(blocks, pairs, strict=True):
        edit = found[task, layer.index]
        assert edit.first is first and f"{layer.path}.{edit.site}".startswith(
            f"{layer.path}.{ATTENTION[name]}."
        )
        for own, theirs in zip(
            edit.parts(), (source.weight, source.bias, project.weight, project.bias), strict=True
        ):
            torch.testing.assert_close(own, theirs.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ATTENTION)
def test_the_librarys_own_forward_with_edits_hooked_in_is_the_chains(name: str) -> None:
    models = subject(name, n=3)
    found = trained(models, IntervMerge(rank=3, steps=2, batch=3, lr=0.1))
    pool, task = models.pool, TASKS[0]
    pool.add("calibrated:edited", pool.source("merged"), found)
    (batch,) = models.batches()
    with torch.no_grad():
        state, side = pool.chain.start(batch.inputs)
        plain_state = state
        moved = []
        for layer in pool.chain.layers:
            state = pool.layer_map("calibrated:edited", layer, task)(state, side)
            plain_state = pool.layer_map("merged", layer, task)(plain_state, side)
            theirs = pool.library_states("calibrated:edited", batch.inputs, task)[layer.index - 1]
            torch.testing.assert_close(theirs[layer.stream], state[layer.stream], rtol=1e-9, atol=1e-9)
            moved.append(float((state[layer.stream] - plain_state[layer.stream]).abs().max()))
    assert moved[0] == 0 and min(moved[1:]) > 1e-3


def test_maps_act_inside_the_whole_model_while_it_is_lent_and_no_longer() -> None:
    """As when it generates: edits in blocks, and a map behind the final norm, which has no boundary of its own."""
    models = subject("llama", n=3)
    pool, task = models.pool, TASKS[0]
    last = pool.chain.layers[-1]
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn(16, 16, generator=draw, dtype=torch.float64)
    found = trained(models, IntervMerge(rank=3, steps=1, batch=3)) | {(task, last.index): Linear(matrix)}
    pool.add("calibrated:edited", pool.source("merged"), found)
    (batch,) = models.batches()
    mask = batch.inputs["attention_mask"].bool()
    with torch.no_grad():
        state, side = pool.chain.start(batch.inputs)
        for layer in pool.chain.layers:
            state = pool.layer_map("calibrated:edited", layer, task)(state, side)
        with pool.loaded("merged") as module:
            before = final_features(module, batch.inputs)
        with pool.loaded("calibrated:edited", task) as module:
            inside = final_features(module, batch.inputs)
        with pool.loaded("calibrated:edited", "another task") as module:
            assert torch.equal(final_features(module, batch.inputs), before)
    torch.testing.assert_close(inside, state[last.stream][mask], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(inside, before)


def test_a_tap_hears_what_comes_of_an_edit() -> None:
    models = subject("hf_clip_vit", n=2)
    found = trained(models, IntervMerge(steps=1, batch=2))
    layer, task = models.pool.chain.blocks[0], TASKS[0]
    models.pool.add("calibrated:edited", models.pool.source("merged"), found)
    (batch,) = models.batches()
    heard: dict[str, Tensor] = {}

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None]:
        return lambda y: heard.__setitem__(site, y)

    with torch.no_grad():
        state, side = models.pool.chain.start(batch.inputs)
        state = models.pool.layer_map("merged", models.pool.chain.layers[0], task)(state, side)
        models.pool.layer_map("merged", layer, task)(state, side, tap)
        before = dict(heard)
        models.pool.layer_map("calibrated:edited", layer, task)(state, side, tap)
    edit = found[task, layer.index]
    torch.testing.assert_close(heard[edit.site], edit(before[edit.site]))
    assert not torch.equal(heard[edit.site], before[edit.site])
    assert torch.equal(heard["self_attn.q_proj"], before["self_attn.q_proj"])


def test_what_is_saved_says_where_it_belongs_and_is_all_of_it() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = (torch.randn(2, 6, generator=draw), torch.randn(2, generator=draw)) * 2
    edits = {
        ("b", 3): Edit(*parts, first=True, site="attn.out"),
        ("a/x", 2): Edit(*parts, first=False, site="o"),
    }
    again = attachments_from(attachment_tensors(edits).items(), IntervMerge.attachment)
    assert again.keys() == edits.keys()
    for place, edit in edits.items():
        assert (again[place].first, again[place].site) == (edit.first, edit.site)
        assert all(map(torch.equal, again[place].parts(), edit.parts()))


def test_blocks_that_add_nothing_to_what_entered_are_refused() -> None:
    models = subject("sequential", n=2)
    layer: Layer = models.pool.chain.blocks[0]
    with pytest.raises(IncompatibleModelsError, match=f"in {layer.path} no linear module's output is added"):
        trained(models, IntervMerge(steps=1))
