"""What every adapter owes the engine, checked on its own tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftlens.models.architectures.module_list import NAME, sequential_chain
from driftlens.models.chain import LayerChain, adapters
from tests.zoo.cases import samples
from tests.zoo.hand_made import tiny_stack, two_texts
from tests.zoo.small import TINY
from tests.zoo.walking import chain_states, largest_difference, parameters


def images(generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, 3, 16, 16, generator=generator, dtype=dtype)


INPUTS: dict[str, Callable[[torch.Generator, int, torch.dtype], Any]] = {
    "seq2seq": lambda generator, n, dtype: two_texts(generator, n)
}
"""Raw inputs of tiny models that don't take images: (generator, samples, dtype) -> inputs."""
SCORES = {"seq2seq": {"lm_head.weight"}}
"""Weights that make scores of final features, and belong to no layer."""
ROUNDS = {"seq2seq"}
"""Adapters whose library takes the mean square of its norms in float32, whatever the dtype of the model."""


@dataclass(frozen=True)
class Subject:
    name: str
    module: nn.Module
    chain: LayerChain
    inputs: Any


@pytest.fixture(scope="module", params=[*adapters, NAME])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def subject_of(name: str, dtype: torch.dtype, n: int = 3) -> Subject:
    module = (TINY[name] if name in adapters else tiny_stack)().to(dtype)
    inputs = INPUTS.get(name, images)(torch.Generator().manual_seed(0), n, dtype)
    # A module of no family shows the order of its sites only on an example.
    chain = adapters[name].chain(module) if name in adapters else sequential_chain(module, inputs)
    return Subject(name, module, chain, inputs)


@pytest.fixture
def subject(name: str) -> Subject:
    return subject_of(name, torch.float64)


def hook_count(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
def test_every_boundary_equals_the_librarys_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    subject = subject_of(name, dtype)
    own = chain_states(subject.chain, subject.module, subject.inputs)
    library = subject.chain.library_states(subject.module, subject.inputs)
    scale = max(1.0, *(leaf.abs().max().item() for state in library for leaf in state.values()))
    assert largest_difference(own, library) <= tolerance * scale


def test_the_last_boundary_is_what_the_module_returns(subject: Subject) -> None:
    with torch.no_grad():
        if isinstance(subject.inputs, dict):
            returned = subject.module(**subject.inputs, output_hidden_states=True)
            mask = subject.inputs["decoder_attention_mask"]
            feature = returned.decoder_hidden_states[-1] * mask[..., None]
        else:
            returned = subject.module(subject.inputs)
            feature = getattr(returned, "image_embeds", returned)
    torch.testing.assert_close(
        chain_states(subject.chain, subject.module, subject.inputs)[-1]["hidden"], feature, rtol=0, atol=1e-11
    )


def test_samples_do_not_meet(subject: Subject) -> None:
    together = chain_states(subject.chain, subject.module, subject.inputs)
    for position in range(3):
        alone = chain_states(subject.chain, subject.module, samples(subject.inputs, slice(position, position + 1)))
        mine = [{key: leaf[position : position + 1] for key, leaf in state.items()} for state in together]
        assert largest_difference(alone, mine) < 1e-12


def test_every_parameter_belongs_to_exactly_one_layer(subject: Subject) -> None:
    chain = subject.chain
    keys = {key for key, _ in subject.module.named_parameters()} - SCORES.get(subject.name, set())
    assert set(chain.parameter_keys()) == keys
    slots = [slot for layer in chain.layers for slot in chain.own_parameters(layer).values()]
    assert len(set(slots)) == len(slots)
    for key in keys:
        parameter = subject.module.get_parameter(key)
        mine = [slot.rows for slot in slots if slot.key == key]
        if None in mine:
            assert mine == [None]
        else:  # the slices of a fused tensor are its rows, each once
            rows = [row for start, stop in mine for row in range(start, stop)]
            assert sorted(rows) == list(range(len(parameter)))


def test_a_library_pass_leaves_the_module_as_it_was(subject: Subject) -> None:
    before = {key: value.clone() for key, value in subject.module.state_dict().items()}
    hooks, modes = hook_count(subject.module), [m.training for m in subject.module.modules()]
    subject.chain.library_states(subject.module, subject.inputs)
    with pytest.raises(Exception, match=r".+"):  # what it is, is the library's affair
        subject.chain.library_states(subject.module, "not an image")
    assert hook_count(subject.module) == hooks
    assert [m.training for m in subject.module.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in subject.module.state_dict().items())


def test_a_layer_changes_nothing_it_is_given(subject: Subject) -> None:
    weights = subject.module.state_dict()
    state, side = subject.chain.start(subject.inputs)
    for layer in subject.chain.layers:
        given = {key: leaf.clone() for key, leaf in state.items()}
        mine = {key: value.clone() for key, value in parameters(layer, weights).items()}
        after = layer.call(mine, state, side)
        assert all(torch.equal(state[key], given[key]) for key in given)
        assert all(torch.equal(mine[key], value) for key, value in parameters(layer, weights).items())
        state = after


def test_taps_see_each_site_once_in_order_and_change_nothing(subject: Subject) -> None:
    weights = subject.module.state_dict()
    state, side = subject.chain.start(subject.inputs)
    for layer in subject.chain.layers:
        seen: list[tuple[str, Tensor]] = []
        outputs: dict[str, Tensor] = {}
        mine = parameters(layer, weights)

        def tap(site: str, x: Tensor) -> Callable[[Tensor], None]:
            seen.append((site, x))  # noqa: B023 - called before the loop goes on
            return partial(outputs.__setitem__, site)  # noqa: B023

        with torch.no_grad():
            after = layer.call(mine, state, side, tap)
            assert largest_difference([after], [layer.call(mine, state, side)]) == 0
        assert [site for site, _ in seen] == [site.name for site in layer.sites]
        inputs = dict(seen)
        assert list(outputs) == list(inputs)
        for site in layer.sites:
            weight = mine[f"{site.name}.weight"]
            assert inputs[site.name].shape[-1] == weight.shape[-1]
            if site.kind == "linear":
                output = F.linear(inputs[site.name], weight, mine.get(f"{site.name}.bias"))
                torch.testing.assert_close(outputs[site.name], output, rtol=0, atol=1e-12)
            for other in layer.sites:
                if other.input == site.input:
                    assert torch.equal(inputs[other.name], inputs[site.name])
        state = after


def test_token_weights_are_known_by_name_and_fit_their_sites(subject: Subject) -> None:
    weights = subject.module.state_dict()
    state, side = subject.chain.start(subject.inputs)
    for layer in subject.chain.layers:
        seen: dict[str, Tensor] = {}
        after = layer.call(parameters(layer, weights), state, side, seen.__setitem__)
        for site in layer.sites:
            assert site.token_weights in {"uniform", *subject.chain.token_weights}
            if site.token_weights in subject.chain.token_weights:
                weight = subject.chain.token_weights[site.token_weights](state, side)
                assert weight.shape == seen[site.name].shape[:-1] and bool((weight >= 0).all())
        state = after


def test_blocks_are_found_at_their_paths(subject: Subject) -> None:
    for layer in subject.chain.blocks:
        block = subject.module.get_submodule(layer.path)
        assert {f"{layer.path}.{key}" for key, _ in block.named_parameters()} == {
            slot.key for slot in subject.chain.own_parameters(layer).values()
        }


# torch scripts some of its forward-mode formulas on first use, and warns that it shouldn't.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_forward_and_reverse_derivatives_agree(subject: Subject) -> None:
    weights = subject.module.state_dict()
    generator = torch.Generator().manual_seed(1)
    state, side = subject.chain.start(subject.inputs)
    for layer in subject.chain.layers:
        mine = parameters(layer, weights)
        with torch.no_grad():
            after = layer.call(mine, state, side)
        if layer.role != "stem":
            stream = layer.stream
            hidden = state[stream]

            def call(x: Tensor) -> Tensor:
                return layer.call(mine, {**state, stream: x}, side)[stream]  # noqa: B023 - as above

            along = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
            against = torch.randn(after[stream].shape, generator=generator, dtype=hidden.dtype)
            with sdpa_kernel(SDPBackend.MATH):
                _, pushed = torch.func.jvp(call, (hidden,), (along,))
                pulled = torch.func.vjp(call, hidden)[1](against)[0]
                step = 1e-5 * along
                secant = (call(hidden + step) - call(hidden - step)) / 2e-5
            near = 1e-6 if subject.name in ROUNDS else 1e-10
            torch.testing.assert_close((against * pushed).sum(), (pulled * along).sum(), rtol=near, atol=near)
            if subject.name not in ROUNDS:  # a secant of steps
                torch.testing.assert_close(pushed, secant, rtol=1e-5, atol=1e-6)
        state = after


def test_no_other_architecture_claims_it(subject: Subject) -> None:
    claims = {other for other in adapters if adapters[other].matches(subject.module)}
    assert claims == {subject.name} - {NAME}
