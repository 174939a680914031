"""Sites of every kind of module: what they hear and say is their own weights' doing, whatever the library stores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import driftlens as dl
from driftlens.engine.sites import norm_without_affine
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import Layer, LayerChain, pool_features
from tests.zoo.walking import chain_states, parameters

CHANNELS = 6


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm write it."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Kernels(nn.Module):
    """Convolutions of all sorts, two of which read the same tensor in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm2d(CHANNELS)
        self.wide = nn.Conv2d(CHANNELS, 7, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
        self.point = nn.Conv2d(CHANNELS, 7, 1, bias=False)
        self.twin = nn.Conv2d(CHANNELS, 3, 1)
        self.skipping = nn.Conv2d(7, 4, 1, stride=2)
        self.same = nn.Conv2d(4, CHANNELS, 3, padding="same")
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.mirrored = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="reflect")
        self.batch = nn.BatchNorm2d(CHANNELS)
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(x))  # the norm alone leaves its channels dependent
        y = self.wide(x).mean(dim=(2, 3), keepdim=True) + self.point(x)
        y = self.same(F.elu(self.skipping(y), inplace=True)) + self.twin(x).mean()
        return self.batch(self.mirrored(self.depthwise(y))) * self.scale


class Upright(nn.Module):
    """GPT-2's linear module, square, so that only its values tell how it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.rest = Conv1D(CHANNELS, CHANNELS), Conv1D(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rest(torch.tanh(self.attn(x)))


def built(block: type[nn.Module]) -> nn.Module:
    module = nn.Sequential(block(), block())
    for weight in module.parameters():
        nn.init.normal_(weight)
    return module.double().eval()


def inputs(block: type[nn.Module], n: int = 4, t: int = 5) -> Tensor:
    shape = (n, CHANNELS, 9, 8) if block is Kernels else (n, t, CHANNELS)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def heard(chain: LayerChain, layer: Layer, module: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of every site of the first block."""
    found: dict[str, Any] = {}

    def tap(name: str, rows: Tensor) -> Any:
        return lambda output: found.update({name: (rows, output)})

    layer.call(parameters(layer, module.state_dict()), {"hidden": x}, chain.start(x)[1], tap)
    return found


@pytest.mark.parametrize("block", [Kernels, Upright])
def test_what_a_site_says_is_its_matrix_times_what_it_hears(block: type[nn.Module]) -> None:
    module, x = built(block), inputs(block)
    chain = sequential_chain(module, x)
    layer = chain.blocks[0]
    found, own = heard(chain, layer, module, x), parameters(layer, module.state_dict())
    assert list(found) == [site.name for site in layer.sites]
    for site in layer.sites:
        rows, output = found[site.name]
        weight, bias = own[f"{site.name}.weight"], own.get(f"{site.name}.bias")
        if site.kind == "linear":
            wanted = F.linear(rows, weight, bias)
        else:
            wanted = norm_without_affine(site, rows) * weight + (0 if bias is None else bias)
        torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-10)


def test_kernels_share_their_rows_only_where_they_make_the_same_ones() -> None:
    chain = sequential_chain(built(Kernels), inputs(Kernels))
    reads = {site.name: site.input for site in chain.blocks[0].sites}
    assert reads["point"] == reads["twin"] == "point" and reads["wide"] == "wide"


def test_what_is_no_linear_map_is_named_with_what_it_is() -> None:
    layer = sequential_chain(built(Kernels), inputs(Kernels)).blocks[0]
    kinds = {owner or name: words for name, (owner, words) in layer.no_sites.items()}
    assert kinds == {
        "depthwise": "Conv2d: depthwise or grouped",
        "mirrored": "Conv2d: no plain convolution of images",
        "batch": "BatchNorm2d: it uses training statistics",
        "scale": "Kernels.scale",
    }


@pytest.mark.parametrize("block", [Kernels, Upright])
def test_weights_go_back_as_they_are_stored(block: type[nn.Module]) -> None:
    module = built(block)
    for layer in sequential_chain(module, inputs(block)).layers:
        for slot in layer.parameters.values():
            stored = module.state_dict()[slot.key]
            own = slot.to_layer_layout(stored)
            assert tuple(own.shape) == slot.layer_shape(tuple(stored.shape))
            assert torch.equal(slot.to_stored_layout(own), stored)


@pytest.mark.parametrize("block", [Kernels, Upright])
def test_spoiled_weights_are_found_again_in_the_shape_in_which_they_are_stored(
    block: type[nn.Module],
) -> None:
    """Wanted is what the expert's own weight makes of the merged model's features, so the solution is that weight."""
    torch.manual_seed(0)
    expert, other, x = built(block), built(block), inputs(block, 24)
    solved = {
        f"{layer.path}.{site.name}.{part}"
        for layer in sequential_chain(expert, x).blocks
        for site in layer.sites
        for part in ("weight", "bias")
    }
    spoiled = copy.deepcopy(expert)
    for name, value in spoiled.state_dict().items():
        if name in solved:
            value.lerp_(other.state_dict()[name], 0.3)
    calibrator = dl.FeatCal(lam=1e-12, rho=1.0, alpha=0.0)
    model = calibrator.fit(spoiled, None, {"a": expert}, {"a": x}, blocks="").model_
    for name, value in expert.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-6)
        assert name not in solved or (spoiled.state_dict()[name] - value).abs().max() > 0.05
    assert set(calibrator.modules_) == {name.rpartition(".")[0] for name in solved}


class Routed(nn.Module):
    """A mixture whose experts see the tokens that choose them, by the name `experts` or by another."""

    def __init__(self, name: str, runs_empty: bool) -> None:
        super().__init__()
        self.gate, self.name, self.runs_empty = nn.Linear(CHANNELS, 3), name, runs_empty
        self.shared_experts = nn.Linear(CHANNELS, CHANNELS)
        self.add_module(name, nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best, out = self.gate(flat).argmax(dim=1), self.shared_experts(flat)
        for number, expert in enumerate(getattr(self, self.name)):
            chosen = (best == number).nonzero()[:, 0]
            if len(chosen) or self.runs_empty:
                out = out.index_add(0, chosen, expert(flat[chosen]))
        return x + out.view_as(x)


@pytest.mark.parametrize("tokens", [(7, 5), (1, 5), (1, 1), (4, 3)])
@pytest.mark.parametrize("empty", [False, True])
def test_experts_of_a_mixture_are_named_and_what_every_token_passes_is_a_site(
    tokens: tuple[int, int], empty: bool
) -> None:
    """Also where a batch of few tokens gives an expert as many rows as it has samples or tokens, or none."""
    for name in ("experts", "paths"):
        torch.manual_seed(0)
        module = nn.ModuleList(Routed(name, empty) for _ in range(2)).double()
        chain = sequential_chain(nn.Sequential(*module), inputs(Routed, *tokens), blocks="")
        for layer in chain.blocks:
            assert [site.name for site in layer.sites] == ["gate", "shared_experts"]
            assert {owner for owner, _ in layer.no_sites.values()} == {f"{name}.{at}" for at in range(3)}


def test_features_with_channels_last_wait_as_tokens() -> None:
    """Swin's [n, h, w, c]: pooled over space, not over channels."""

    class Narrowing(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4 * width, 2 * width)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=-1)).tanh()

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.Sequential(Narrowing(3), Narrowing(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.stages(x.permute(0, 2, 3, 1))

    module = Pyramid().double()
    x = torch.randn(4, 3, 8, 12, dtype=torch.float64)
    chain = sequential_chain(module, x)
    assert chain.modality.pool == "mean"
    states = chain_states(chain, module, x)
    shapes = [list(state["hidden"].shape[1:]) for state in states]
    assert shapes == [[96, 3], [24, 6], [6, 12], [6, 12]]
    torch.testing.assert_close(states[-1]["hidden"], module(x).flatten(1, 2), rtol=0, atol=0)
    library = chain.library_states(copy.deepcopy(module), x)
    assert [list(found["hidden"].shape[1:]) for found in library] == shapes


class Gated(nn.Module):
    """A block of [n, h, w, c] that convolves inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Moved(nn.Module):
    """Channels last inside, or first, between features of the other kind."""

    def __init__(self, inner: nn.Module, there: tuple[int, ...], back: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.there, self.back = inner, there, back

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(self.there)).permute(self.back)


LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def to_last(conv: nn.Conv2d) -> nn.Module:
    return Moved(conv, (0, 1, 2, 3), LAST)


@pytest.mark.parametrize(
    "blocks, widths",
    [
        ((to_last(nn.Conv2d(3, 6, 2, 2)), Gated(6), nn.Tanh(), Gated(6)), (3, 6, 6, 6, 6)),
        ((nn.Conv2d(3, 6, 1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 1)), (3, 6, 6, 6, 5)),
        ((nn.Conv2d(3, 6, 1), Moved(nn.Linear(6, 7), LAST, FIRST), nn.Conv2d(7, 5, 1)), (3, 6, 7, 5)),
        (
            (to_last(nn.Conv2d(3, 6, 1)), Moved(nn.Conv2d(6, 7, 1), FIRST, LAST), nn.Linear(7, 5)),
            (3, 6, 7, 5),
        ),
    ],
    ids=[
        "channels last around convolutions",
        "nothing reads between",
        "permuted to last",
        "permuted to first",
    ],
)
def test_channels_are_where_the_next_reader_takes_them_to_be(
    blocks: tuple[nn.Module, ...], widths: tuple[int, ...]
) -> None:
    module = nn.Sequential(*blocks).double()
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    chain = sequential_chain(module, x, blocks="")
    states = chain.library_states(copy.deepcopy(module), x)
    assert tuple(pool_features(state["hidden"], "mean").shape[1] for state in states[:-1]) == widths
    assert states[-1]["hidden"].shape == states[-2]["hidden"].shape
    _, side = chain.start(x)
    for layer, state, wanted in zip(chain.blocks, states, states[1:], strict=False):
        own = parameters(layer, module.state_dict())
        torch.testing.assert_close(layer.call(own, state, side), wanted, rtol=1e-12, atol=1e-12)


class Stages(nn.Module):
    """Stages that are attributes, as those of a ResNet."""

    def __init__(self, numbered: bool = True) -> None:
        super().__init__()
        names = ("layer1", "layer2", "layer3") if numbered else ("early", "middle", "late")
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.names = names
        self.layer_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return self.layer_norm(x)


def test_numbered_stages_are_the_blocks_and_a_pattern_names_them() -> None:
    chain = sequential_chain(Stages(), torch.randn(2, 4))
    assert chain.settings["blocks"] == "layer[0-9]*"
    assert [layer.path for layer in chain.blocks] == ["layer1", "layer2", "layer3"]
    inner = sequential_chain(Stages(), torch.randn(2, 4), blocks="layer?.*")
    assert [layer.path for layer in inner.blocks] == [f"layer{at}.{part}" for at in (1, 2, 3) for part in (0, 1)]
    nested = nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]) for _ in range(2)])
    assert sequential_chain(nested, torch.randn(2, 4)).settings["blocks"] == ""
