"""The sequential adapter: pieces of a live module, put together again, are the module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftlens.models.architectures.module_list import check_deterministic, sequential_chain
from driftlens.models.chain import LayerChain
from driftlens.utils.errors import (
    IncompatibleModelsError,
    NumericsError,
    SpecError,
)
from tests.zoo.stacks import STACKS, WIDTH, Plain, Residual, Stack, rows
from tests.zoo.walking import assert_close, plain_forward, walk, weights

N = 4


@pytest.fixture(params=STACKS, ids=list(STACKS))
def stack(request: pytest.FixtureRequest) -> Stack:
    return STACKS[request.param]


@pytest.fixture(autouse=True)
def fused_attention() -> Iterator[None]:
    """PyTorch's fused attention is on before each test, and must be after it."""
    assert torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.backends.mha.get_fastpath_enabled()


def chain_of(stack: Stack, module: nn.Module) -> LayerChain:
    return sequential_chain(module, stack.inputs(torch.Generator().manual_seed(9), 2))


def snapshot(module: nn.Module) -> Iterator[object]:
    """Everything about a module that could be left changed."""
    for name, part in module.named_modules():
        yield (
            name,
            part.training,
            "forward" in part.__dict__,
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
        )
    for name, value in module.state_dict(keep_vars=True).items():
        yield name, id(value), value.sum().item()


def test_the_layers_in_turn_are_the_module(stack: Stack, generator: torch.Generator) -> None:
    module, inputs = stack.module(), stack.inputs(generator, N)
    states = walk(chain_of(stack, module), module, inputs)
    assert_close(states[-1]["hidden"], plain_forward(module, inputs))


def test_another_models_weights_give_that_models_features(stack: Stack) -> None:
    """Wrong wherever a layer uses the skeleton's weights in the place of those it is given."""
    skeleton, other = stack.module(0), stack.module(1)
    inputs = stack.inputs(torch.Generator().manual_seed(5), N)
    chain = chain_of(stack, skeleton)
    expected = chain.library_states(other, inputs)
    for state, wanted in zip(walk(chain, other, inputs)[1:], expected, strict=True):
        assert_close(state["hidden"], wanted["hidden"])
    assert_close(expected[-1]["hidden"], plain_forward(other, inputs))
    assert not torch.allclose(expected[-1]["hidden"], plain_forward(skeleton, inputs), rtol=1e-3)


def test_states_of_the_library_are_those_of_its_own_blocks(generator: torch.Generator) -> None:
    module = STACKS["residual_mlp"].module()
    x = rows(generator, N)
    with torch.no_grad():
        hidden = [module.stem(x)]
        for layer in module.layers:
            hidden.append(layer(hidden[-1]))
        hidden.append(module.out(module.norm(hidden[-1])))
    for state, wanted in zip(sequential_chain(module, x).library_states(module, x), hidden, strict=True):
        assert torch.equal(state["hidden"], wanted)


def test_nothing_is_left_changed(stack: Stack, generator: torch.Generator) -> None:
    module = stack.module()
    next(iter(module.children())).train()  # flags that differ from part to part
    before = list(snapshot(module))
    inputs = stack.inputs(generator, N)
    kept = copy.deepcopy(inputs)
    chain = chain_of(stack, module)
    states = walk(chain, module, inputs)
    copies = copy.deepcopy(states)
    walk(chain, module, inputs)
    _, side = chain.start(inputs)
    for layer, parameters, here in zip(chain.layers, weights(chain, module), states, strict=False):
        layer.call(parameters, here, side, tap=lambda _name, _value: None)
    chain.library_states(module, inputs)
    assert list(snapshot(module)) == before
    torch.testing.assert_close(inputs, kept, rtol=0, atol=0)
    torch.testing.assert_close(states, copies, rtol=0, atol=0)


def test_eval_mode_is_used_whatever_the_flags_say(generator: torch.Generator) -> None:
    module = STACKS["residual_mlp"].module()
    inputs = rows(generator, N)
    expected = plain_forward(module, inputs)
    chain = sequential_chain(module.train(), inputs)
    assert torch.equal(walk(chain, module, inputs)[-1]["hidden"], expected)
    assert torch.equal(chain.library_states(module, inputs)[-1]["hidden"], expected)
    assert all(part.training for part in module.modules())


class Failing(Residual):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ZeroDivisionError
        return super().forward(x)


def test_nothing_is_left_changed_when_a_block_fails(generator: torch.Generator) -> None:
    module = STACKS["residual_mlp"].module()
    module.layers[1] = Failing().double()
    chain = sequential_chain(module, rows(generator, 2))
    good, side = walk(chain, module, rows(generator, 2)), chain.start(rows(generator, 2))[1]
    before = list(snapshot(module))
    bad = {"hidden": torch.zeros(3, WIDTH, dtype=torch.float64)}
    with pytest.raises(ZeroDivisionError):
        chain.start(rows(generator, 3))
    with pytest.raises(ZeroDivisionError):
        chain.library_states(module, rows(generator, 3))
    with pytest.raises(ZeroDivisionError):
        chain.layers[2].call(weights(chain, module)[2], bad, side, tap=lambda _name, _value: None)
    assert list(snapshot(module)) == before
    assert len(good) == 6


# PyTorch scripts the decompositions of its forward-mode derivatives when they are first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["residual_mlp", "in_place", "masked_attention", "torch_encoder", "images"])
def test_derivatives_agree_with_finite_differences_and_batch(name: str, generator: torch.Generator) -> None:
    """jvp, and vmap over it, through every layer whose input is state, against central differences."""
    module, inputs = STACKS[name].module(), STACKS[name].inputs(generator, 2)
    chain = chain_of(STACKS[name], module)
    states, (_, side) = walk(chain, module, inputs), chain.start(inputs)
    for layer, parameters, state in zip(chain.layers, weights(chain, module), states[:-1], strict=True):
        if not state:
            continue  # token ids have no derivative
        (entry,) = state
        direction = torch.randn(state[entry].shape, generator=generator, dtype=torch.float64)

        def forward(value: Tensor, layer=layer, parameters=parameters, entry=entry) -> Tensor:
            return layer.call(parameters, {entry: value}, side)["hidden"]

        def product(start: Tensor, along: Tensor, forward=forward) -> Tensor:
            return torch.func.jvp(forward, (start,), (along,))[1]

        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            nodes = torch.stack([state[entry], state[entry] + 0.1 * direction])
            # vmap can't write in place where only the point is mapped and the direction is not.
            directions = direction.expand_as(nodes) if name == "in_place" else direction
            products = torch.func.vmap(product, in_dims=(0, 0 if name == "in_place" else None))(nodes, directions)
            for node, batched in zip(nodes, products, strict=True):
                numeric = (forward(node + 1e-5 * direction) - forward(node - 1e-5 * direction)) / 2e-5
                torch.testing.assert_close(batched, numeric, rtol=1e-6, atol=1e-8)
                assert_close(batched, product(node, direction))


def test_sites_come_in_the_order_they_run_with_shared_inputs() -> None:
    chain = chain_of(STACKS["masked_attention"], STACKS["masked_attention"].module())
    sites = chain.blocks[0].sites
    assert [(site.name, site.kind, site.input) for site in sites] == [
        ("norm", "rms_norm", "norm"),
        ("q", "linear", "q"),
        ("k", "linear", "q"),
        ("v", "linear", "q"),
        ("o", "linear", "o"),
    ]


def test_the_hidden_projection_of_torchs_attention_is_no_site() -> None:
    chain = chain_of(STACKS["torch_encoder"], STACKS["torch_encoder"].module())
    assert sorted(site.name for site in chain.blocks[0].sites) == ["linear1", "linear2", "norm1", "norm2"]


def test_a_block_that_is_a_linear_module_is_a_site() -> None:
    module = STACKS["sequential_model"].module()
    chain = chain_of(STACKS["sequential_model"], module)
    first, activation, last = chain.blocks
    assert [site.name for site in first.sites] == ["self"]
    assert activation.sites == () and not activation.parameters
    assert {name: slot.key for name, slot in last.parameters.items()} == {
        "self.weight": "2.weight",
        "self.bias": "2.bias",
    }
    assert not chain.layers[0].parameters and not chain.layers[-1].parameters


def test_taps_hear_what_each_site_is_given(stack: Stack, generator: torch.Generator) -> None:
    """What the tap hears is what an ordinary forward pass hands to the module of that name."""
    module, inputs = stack.module(), stack.inputs(generator, N)
    chain = chain_of(stack, module)
    states, (_, side) = walk(chain, module, inputs), chain.start(inputs)
    for layer, parameters, state in zip(chain.blocks, weights(chain, module)[1:], states[1:], strict=False):
        heard: list[tuple[str, Tensor]] = []
        layer.call(parameters, state, side, tap=lambda name, value, heard=heard: heard.append((name, value.clone())))
        assert [name for name, _ in heard] == [site.name for site in layer.sites]
        wanted = native_inputs(module, layer.path, inputs)
        for name, value in heard:
            native = wanted["" if name == "self" else name]
            is_conv = name == "conv"  # 3 x 3 with padding 1; a row per place
            assert_close(value, F.unfold(native, 3, padding=1).mT if is_conv else native)


def native_inputs(module: nn.Module, block: str, inputs: Any) -> dict[str, Tensor]:
    """Inputs of every module inside a block during an ordinary forward pass."""
    seen: dict[str, Tensor] = {}

    def listen_as(name: str) -> Callable[[nn.Module, Any], None]:
        def listen(_module: nn.Module, args: Any) -> None:
            if args:
                seen.setdefault(name, args[0].clone())

        return listen

    parts = module.get_submodule(block).named_modules()
    handles = [part.register_forward_pre_hook(listen_as(name)) for name, part in parts]
    plain_forward(module, inputs)
    for handle in handles:
        handle.remove()
    return seen


def test_parameters_belong_to_where_they_are_used() -> None:
    module = STACKS["masked_attention"].module()
    chain = chain_of(STACKS["masked_attention"], module)
    assert set(chain.own_parameters(chain.layers[0])) == {"class_token", "embed.weight"}
    assert set(chain.own_parameters(chain.layers[-1])) == {"scale", "final.weight"}
    assert set(chain.parameter_keys()) == set(module.state_dict())


def test_running_statistics_are_parameters_and_counters_are_not() -> None:
    chain = chain_of(STACKS["images"], STACKS["images"].module())
    assert "norm.running_mean" in chain.blocks[0].parameters
    assert "norm.num_batches_tracked" not in chain.blocks[0].parameters


def test_blocks_are_residual_when_they_keep_the_shape() -> None:
    chain = chain_of(STACKS["images"], STACKS["images"].module())
    assert [layer.is_residual for layer in chain.layers] == [False, False, True, False]


def test_a_float32_module_lends_itself_to_float64(generator: torch.Generator) -> None:
    stack = STACKS["masked_attention"]
    inputs = stack.inputs(generator, N)
    double = stack.module()
    single = copy.deepcopy(double).float()
    expected = plain_forward(copy.deepcopy(single).double(), inputs)
    chain = chain_of(stack, single)
    state, side = chain.start(inputs)
    with torch.no_grad():
        for layer, parameters in zip(chain.layers, weights(chain, single), strict=True):
            state = layer.call({name: value.double() for name, value in parameters.items()}, state, side)
    torch.testing.assert_close(state["hidden"], expected, rtol=1e-6, atol=1e-6)
    assert state["hidden"].dtype == torch.float64


class Twice(Plain):
    """The list with most blocks is a tie between two."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Residual() for _ in range(3))


class Inner(Plain):
    """Blocks that hold longer lists than the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )


def test_the_outermost_of_equal_lists_is_taken() -> None:
    assert sequential_chain(Inner(), rows(torch.Generator(), N)).settings["blocks"] == "layers"


def test_a_tie_is_refused_and_settled_by_name(generator: torch.Generator) -> None:
    module, inputs = Twice().double(), rows(generator, N)
    with pytest.raises(SpecError, match=r"layers with 3, others with 3\n.*blocks='layers'"):
        sequential_chain(module, inputs)
    chain = sequential_chain(module, inputs, blocks="layers")
    assert_close(walk(chain, module, inputs)[-1]["hidden"], plain_forward(module.eval(), inputs))


@pytest.mark.parametrize(
    ("module", "blocks", "message"),
    [
        (nn.Linear(2, 2), None, "no list of blocks"),
        (Plain(), "layer", "'layer' is not a list of blocks in Plain; there are layers with 3"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 2), None, "one block several times"),
    ],
    ids=["no_list", "wrong_path", "shared_block"],
)
def test_lists_that_will_not_do_are_refused(module: nn.Module, blocks: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sequential_chain(module, None, blocks=blocks)


class Between(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden) * 2
        return hidden


class BetweenInPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden += 1
        return hidden


class Backwards(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return hidden


class Early(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.stem(x))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Between, "changes the features between 'layers.0' and 'layers.1'"),
        (BetweenInPlace, "changes the features between 'layers.0' and 'layers.1'"),
        (Backwards, "'layers.2' runs as number 0, expected 2"),
        (Early, "'layers.1' never runs"),
    ],
    ids=["scaled_between", "scaled_in_place", "backwards", "early_exit"],
)
def test_models_whose_features_do_not_flow_from_block_to_block_are_refused(
    kind: type[Plain], message: str, generator: torch.Generator
) -> None:
    module = kind().double()
    before = list(snapshot(module))
    with pytest.raises(SpecError, match=message):
        sequential_chain(module, rows(generator, N))
    assert list(snapshot(module)) == before


class Beside(nn.Module):
    """A block that returns something beside its features, and takes what the one before returned if it is `read`."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x + self.map(x), self.map(x)[:, :2]


class Handing(nn.Module):
    def __init__(self, read: bool) -> None:
        super().__init__()
        self.blocks, self.read = nn.ModuleList(Beside() for _ in range(3)), read

    def forward(self, x: Tensor) -> Tensor:
        beside = None
        for block in self.blocks:
            x, found = block(x, beside)
            beside = found if self.read else None
        return x


def test_of_shapes_only_what_blocks_return_beside_features_must_reach_no_other_block(
    generator: torch.Generator,
) -> None:
    inputs = torch.randn(N, 4, generator=generator)
    with torch.device("meta"):
        hollow = {read: Handing(read) for read in (False, True)}
    chain, module = sequential_chain(hollow[False], inputs), Handing(False)
    for some in (inputs, inputs[:2]):
        assert_close(walk(chain, module, some)[-1]["hidden"], plain_forward(module, some))
    with pytest.raises(IncompatibleModelsError, match=r"'blocks.1' is given '(beside|1)'.*computed from weights"):
        sequential_chain(hollow[True], inputs)


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + torch.randn_like(out)


def test_randomness_in_eval_mode_is_found(generator: torch.Generator) -> None:
    inputs = rows(generator, N)
    check_deterministic(Plain().double().train(), inputs)
    with pytest.raises(NumericsError, match="is not deterministic: outputs for one batch differ"):
        check_deterministic(Noisy().double(), inputs)
