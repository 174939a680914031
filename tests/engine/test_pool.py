"""Models side by side: raw inputs on their way to them, what is read when, ahead or not, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, BatchFeature

from driftlens.checkpoints.tensor_sources import InMemorySource, module_source
from driftlens.engine.pool import (
    ModelPool,
    input_bytes,
    inputs_to_device,
    stream_weights,
    with_updated_parameters,
)
from driftlens.engine.walk import iter_final_features, sample_cache_bytes, walk
from driftlens.models.tracing.block_sites import fused_tensor
from driftlens.utils.errors import IncompatibleModelsError, NumericsError
from tests.refusing import refusing
from tests.zoo import mixtures
from tests.zoo.cases import CASES, Family, family, perturbed

CPU = torch.device("cpu")
HOLDERS = [dict, UserDict, MappingProxyType, BatchEncoding, BatchFeature]


def batch() -> dict[str, Any]:
    return {"pixel_values": torch.ones(2, 3, dtype=torch.float64), "position_ids": torch.arange(2)}


@pytest.mark.parametrize("holder", HOLDERS)
def test_floating_entries_of_every_mapping_are_cast(holder: Any) -> None:
    found = inputs_to_device(holder(batch()), CPU, torch.float16)
    assert type(found) is dict and list(found) == ["pixel_values", "position_ids"]
    assert found["pixel_values"].dtype == torch.float16 and found["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("holder", HOLDERS)
def test_so_are_those_of_mappings_inside_others(holder: Any) -> None:
    found: Any = inputs_to_device(({"inner": holder(batch())}, [holder(batch())]), CPU, torch.float16)
    assert type(found) is tuple and type(found[1]) is tuple
    for inner in (found[0]["inner"], found[1][0]):
        assert inner["pixel_values"].dtype == torch.float16 and inner["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("holder", HOLDERS)
def test_they_weigh_what_their_tensors_weigh(holder: Any) -> None:
    assert input_bytes(holder(batch())) == 2 * 3 * 8 + 2 * 8
    assert input_bytes([holder({"inner": holder(batch())}), "text", None]) == 64


def test_all_else_is_handed_on() -> None:
    texts, thing = ["one", "two"], object()
    assert inputs_to_device(texts, CPU, torch.float16) == ("one", "two")
    assert inputs_to_device(thing, CPU, torch.float16) is thing
    assert inputs_to_device({"flag": True, "none": None}, CPU, torch.float16) == {"flag": True, "none": None}
    assert inputs_to_device({}, CPU, torch.float16) == {} and input_bytes({}) == 0


CASE = CASES["open_clip_vit"]


@pytest.fixture
def models() -> Family:
    return family(CASE, n=4, batch_size=2)


def with_state(models: Family, state: dict[str, torch.Tensor]) -> ModelPool:
    skeleton = models.modules["base"]
    source = InMemorySource("expert.safetensors", state)
    return ModelPool(models.chain, skeleton, {"odd": source}, device=torch.device("cpu"), dtype=torch.float64)


def state_of(models: Family) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(models.modules["expert:a"].state_dict()))


KEY = "transformer.resblocks.1.mlp.c_fc.weight"


def test_missing_and_unknown_keys_are_named(models: Family) -> None:
    state = state_of(models)
    state["surplus"] = state.pop(KEY)
    with refusing(
        IncompatibleModelsError, "expert.safetensors", match=r"lacks 'transformer.resblocks.1.*has 'surplus'"
    ):
        with_state(models, state)


def test_a_differing_shape_is_named_with_both_shapes(models: Family) -> None:
    state = state_of(models)
    state[KEY] = state[KEY][:, :7]
    with pytest.raises(IncompatibleModelsError, match=rf"{KEY}.*\[64, 7\].*\[64, 32\]"):
        with_state(models, state)


def test_integers_against_floats_are_refused_and_float_widths_are_not(models: Family) -> None:
    state = state_of(models)
    with_state(models, {key: tensor.half() for key, tensor in state.items()})
    state[KEY] = state[KEY].to(torch.int8)
    with pytest.raises(IncompatibleModelsError, match="int8"):
        with_state(models, state)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_when_their_layer_is_read(models: Family, value: float) -> None:
    state = state_of(models)
    state[KEY][3, 3] = value
    pool = with_state(models, state)
    pool.parameters("odd", models.chain.layers[1])
    with pytest.raises(NumericsError, match=KEY):
        pool.parameters("odd", models.chain.layers[2])


def test_features_that_overflow_are_named_by_layer_task_and_sample(models: Family) -> None:
    state = state_of(models)
    models.pool.add("wild", InMemorySource("wild", {k: v * 1e200 if k == KEY else v for k, v in state.items()}))
    models.batches[1].inputs[1] *= 1e300  # the last sample overflows, the others don't
    with torch.no_grad(), pytest.raises(NumericsError) as caught:
        list(walk(models.pool, "a", ["merged"], models.batches, ids=["s0", "s1", "s2", "s3"]))
    assert caught.value.context["sample"] == "s3"
    assert "task 'a'" in caught.value.message and "layer 1 (conv1)" in caught.value.message


def test_only_the_layer_at_hand_is_read(models: Family) -> None:
    read: list[str] = []

    class Watched(InMemorySource):
        def read(self, key: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
            read.append(key)
            return super().read(key, rows)

    models.pool.add("watched", Watched("watched", state_of(models)))
    layer = models.chain.layers[2]
    found = models.pool.parameters("watched", layer)
    assert set(read) == {slot.key for slot in layer.parameters.values()}
    q, k = found["attn.q_proj.weight"], found["attn.k_proj.weight"]
    whole = models.modules["expert:a"].state_dict()["transformer.resblocks.1.attn.in_proj_weight"]
    assert torch.equal(torch.cat([q, k]), whole[:64])


@pytest.mark.parametrize("stored", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_no_pass_copies_experts_of_one_fused_tensor(name: str, stored: torch.dtype) -> None:
    """They lie in one memory: a live model's own, or what they were converted to, or updated in."""
    models = family(mixtures.case(name), n=2, batch_size=2)
    module = models.modules["expert:a"]
    state = {key: value.to(stored) for key, value in module.state_dict().items()}
    pool, layer = with_state(models, state), models.chain.blocks[0]
    before = pool.parameters("odd", layer)
    expert = "mlp.experts.1.down_proj.weight"
    updates = {expert: torch.rand_like(before[expert])}
    after = with_updated_parameters(layer, before, updates)
    assert torch.equal(updates[expert], after[expert])

    by_key: dict[str, list[str]] = {}
    for parameter, slot in layer.parameters.items():
        assert (parameter == expert) != torch.equal(before[parameter], after[parameter])
        if slot.is_stacked:
            by_key.setdefault(slot.key, []).append(parameter)
    for key, names in by_key.items():
        for parameters in (before, after):
            whole = fused_tensor([layer.parameters[name] for name in names], [parameters[name] for name in names])
            assert whole.data_ptr() == parameters[names[0]].data_ptr()
        if stored == torch.float64:
            assert before[names[0]].data_ptr() == state[key].data_ptr()


def test_library_forward_with_streamed_weights_is_the_live_models_own(models: Family) -> None:
    """The pool's skeleton holds the base; the expert's weights come and go block by block."""
    skeleton, expert = models.modules["base"], models.modules["expert:a"]
    inputs = models.batches[0].inputs
    resident: list[int] = []

    def count(*_: object) -> None:
        blocks = skeleton.transformer.resblocks
        ours = expert.transformer.resblocks
        resident.append(
            sum(torch.equal(b.mlp.c_fc.weight, e.mlp.c_fc.weight) for b, e in zip(blocks, ours, strict=True))
        )

    handles = [block.mlp.register_forward_hook(count) for block in skeleton.transformer.resblocks]
    with torch.no_grad(), streamed(models, skeleton, "expert:a"):
        found = skeleton(inputs)
        wanted = expert(inputs)
    for handle in handles:
        handle.remove()
    assert torch.equal(found, wanted)
    assert resident == [1, 1, 1]


def streamed(models: Family, skeleton: torch.nn.Module, name: str) -> AbstractContextManager[None]:
    paths = [layer.path for layer in models.chain.blocks]
    return stream_weights(skeleton, paths, models.pool.source(name).read, torch.device("cpu"))


def test_an_exception_inside_the_library_leaves_the_skeleton_as_it_was(models: Family) -> None:
    skeleton = models.modules["base"]
    before = {key: value.clone() for key, value in skeleton.state_dict().items()}
    with pytest.raises(RuntimeError), streamed(models, skeleton, "expert:a"):
        skeleton(torch.zeros(1, 3, 5, 5, dtype=torch.float64))
    assert all(torch.equal(value, before[key]) for key, value in skeleton.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in skeleton.modules())


@pytest.mark.slow
def test_features_of_one_boundary_wait_and_no_more(models: Family) -> None:
    """Bytes of all live feature tensors while the walk runs, as the garbage collector knows them."""
    per_sample = sample_cache_bytes(models.pool, "merged", models.batches[0].inputs[:1])
    assert per_sample == 17 * 32 * 8
    gc.collect()
    before, most = live_bytes(17, 32), 0
    with torch.no_grad():
        for view in walk(models.pool, "a", ["merged"], models.batches):
            if view.layer.role == "block":
                most = max(most, live_bytes(17, 32) - before)
    # Two models of four samples wait; of the batch of two at hand there are the outputs and the crossed output, and
    # the view of the batch before it.
    assert most <= (2 * 4 + 3 * 2 + 3 * 2) * per_sample


def live_bytes(*shape: int) -> int:
    """Memory of all tensors [n, *shape] that are alive, views of one storage counted once."""
    alive = {
        t.untyped_storage().data_ptr(): t.nbytes
        for t in gc.get_objects()
        if type(t) is torch.Tensor and tuple(t.shape[1:]) == shape
    }
    return sum(alive.values())


def test_plain_forward_equals_the_module(models: Family) -> None:
    with torch.no_grad():
        for (start, found), batch in zip(
            iter_final_features(models.pool, "merged", models.batches), models.batches, strict=True
        ):
            assert start == batch.start
            torch.testing.assert_close(found, models.modules["merged"](batch.inputs), rtol=1e-10, atol=1e-12)


def test_a_model_takes_the_place_of_another() -> None:
    models = family(CASES["open_clip_vit"])
    layer = models.chain.layers[1]
    before = models.pool.parameters("merged", layer)
    other = perturbed(models.modules["merged"], seed=9)
    models.pool.add("merged", module_source(other, "other"))
    found = models.pool.parameters("merged", layer)
    assert not any(torch.equal(before[name], found[name]) for name in found)
