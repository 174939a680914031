"""Tiny models with hand-made chains, for the walk: an encoder-decoder and a masked decoder.

Both take a dict of token ids and masks. Their modules have an ordinary forward; the chain is written apart from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, State, Tap, WeightSlot

VOCABULARY = 11
STACK_WIDTH = 16


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor, context: Tensor, allowed: Tensor) -> Tensor:
        scores = self.query(hidden) @ self.key(context).mT / hidden.shape[-1] ** 0.5
        weights = scores.masked_fill(~allowed, -1e9).softmax(dim=-1)
        return self.out(weights @ self.value(context))


class Block(nn.Module):
    def __init__(self, width: int, *, crosses: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.cross = Attention(width) if crosses else None
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(
        self, hidden: Tensor, allowed: Tensor, context: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        normed = self.norm_1(hidden)
        hidden = hidden + self.attention(normed, normed, allowed)
        if self.cross is not None:
            hidden = hidden + self.cross(hidden, context, visible)
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class Decoder(nn.Module):
    """Masked (causal, padded) decoder; its feature is the last real token's."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, causal(mask))
        return self.norm(hidden)[torch.arange(len(ids)), mask.long().sum(dim=1) - 1]


class EncoderDecoder(nn.Module):
    """Encoder and decoder; the decoder reads the encoder's features in every block."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Block(width) for _ in range(depth))
        self.decoder = nn.ModuleList(Block(width, crosses=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        encoded, hidden = self.embed(ids), self.embed(targets)
        for block in self.encoder:
            encoded = block(encoded, mask[:, None, :])
        for block in self.decoder:
            hidden = block(hidden, causal(torch.ones_like(targets, dtype=torch.bool)), encoded, mask[:, None, :])
        return self.norm(hidden[:, -1])


def causal(mask: Tensor) -> Tensor:
    """Which tokens each token may look at, [n, t, t]: itself and real ones before it."""
    t = mask.shape[1]
    before = torch.ones(t, t, dtype=torch.bool, device=mask.device).tril()
    return (before & mask[:, None, :]) | torch.eye(t, dtype=torch.bool, device=mask.device)


def decoder_chain(model: Decoder) -> LayerChain:
    def start(inputs: Mapping[str, Tensor]) -> tuple[State, SideInputs]:
        return {}, SideInputs({"ids": inputs["ids"], "hidden_mask": inputs["mask"]})

    def stem(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        return {"hidden": masked(F.embedding(side["ids"], parameters["weight"]), side)}

    def masked(hidden: Tensor, side: SideInputs) -> Tensor:
        return hidden * side["hidden_mask"][..., None]

    def block(module: nn.Module) -> Callable[..., State]:
        def call(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
            out = functional_call(module, dict(parameters), (state["hidden"], causal(side["hidden_mask"])))
            return {"hidden": masked(out, side)}

        return call

    def head(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        hidden = state["hidden"]
        last = hidden[torch.arange(len(hidden)), side["hidden_mask"].long().sum(dim=1) - 1]
        return {"hidden": F.layer_norm(last, last.shape[-1:], parameters["weight"], parameters["bias"])}

    def library_states(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[State]:
        assert isinstance(module, Decoder)
        caught = watch(module, [module.embed, *module.blocks], inputs)
        return [{"hidden": out * inputs["mask"][..., None]} for out in caught[:-1]] + [{"hidden": caught[-1]}]

    return LayerChain(
        architecture="tiny decoder",
        layers=layers(
            ("embed", slots(model, "embed"), stem, "hidden"),
            *((f"blocks.{i}", slots(model, f"blocks.{i}"), block(b), "hidden") for i, b in enumerate(model.blocks)),
            ("norm", slots(model, "norm"), head, "hidden"),
        ),
        start=start,
        library_states=library_states,
    )


def encoder_decoder_chain(model: EncoderDecoder) -> LayerChain:
    def start(inputs: Mapping[str, Tensor]) -> tuple[State, SideInputs]:
        return {}, SideInputs({"ids": inputs["ids"], "targets": inputs["targets"], "encoded_mask": inputs["mask"]})

    def seen(encoded: Tensor, side: SideInputs) -> Tensor:
        return encoded * side["encoded_mask"][..., None]

    def stem(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        embed = parameters["weight"]
        return {
            "encoded": seen(F.embedding(side["ids"], embed), side),
            "hidden": F.embedding(side["targets"], embed),
        }

    def encode(module: nn.Module) -> Callable[..., State]:
        def call(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
            visible = side["encoded_mask"][:, None, :]
            return {
                **state,
                "encoded": seen(functional_call(module, dict(parameters), (state["encoded"], visible)), side),
            }

        return call

    def decode(module: nn.Module) -> Callable[..., State]:
        def call(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
            allowed = causal(torch.ones_like(side["targets"], dtype=torch.bool))
            visible = side["encoded_mask"][:, None, :]
            arguments = (state["hidden"], allowed, state["encoded"], visible)
            return {**state, "hidden": functional_call(module, dict(parameters), arguments)}

        return call

    def head(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        last = state["hidden"][:, -1]
        return {"hidden": F.layer_norm(last, last.shape[-1:], parameters["weight"], parameters["bias"])}

    def library_states(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[State]:
        assert isinstance(module, EncoderDecoder)
        first, second, *rest = watch(module, [module.embed, *module.encoder, *module.decoder], inputs)
        # The embedding runs twice: once for the encoder's tokens, once for the decoder's.
        mask, depth = inputs["mask"][..., None], len(module.encoder)
        encoded = [first * mask, *(out * mask for out in rest[:depth])]
        states = [{"encoded": out, "hidden": second} for out in encoded]
        states += [{"encoded": encoded[-1], "hidden": out} for out in rest[depth:-1]]
        return [*states, {"hidden": rest[-1]}]

    blocks = [
        *((f"encoder.{i}", encode(b), "encoded") for i, b in enumerate(model.encoder)),
        *((f"decoder.{i}", decode(b), "hidden") for i, b in enumerate(model.decoder)),
    ]
    return LayerChain(
        architecture="tiny encoder-decoder",
        layers=layers(
            ("embed", slots(model, "embed"), stem, "hidden"),
            *((path, slots(model, path), call, stream) for path, call, stream in blocks),
            ("norm", slots(model, "norm"), head, "hidden"),
        ),
        start=start,
        library_states=library_states,
    )


def layers(*parts: tuple[str, dict[str, WeightSlot], Callable[..., State], str]) -> tuple[Layer, ...]:
    last = len(parts)
    return tuple(
        Layer(
            index=index,
            role="stem" if index == 1 else "head" if index == last else "block",
            path=path,
            parameters=parameters,
            call=call,
            stream=stream,
            is_residual=1 < index < last,
        )
        for index, (path, parameters, call, stream) in enumerate(parts, start=1)
    )


def slots(model: nn.Module, path: str) -> dict[str, WeightSlot]:
    return {name: WeightSlot(f"{path}.{name}") for name, _ in model.get_submodule(path).named_parameters()}


def watch(module: nn.Module, watched: list[nn.Module], inputs: Mapping[str, Any]) -> list[Tensor]:
    """Outputs of the watched modules in the order of their calls, and of the whole module."""
    caught: list[Tensor] = []
    handles = [part.register_forward_hook(lambda _m, _i, out: caught.append(out)) for part in watched]
    try:
        with torch.no_grad():
            caught.append(module(**inputs))
    finally:
        for handle in handles:
            handle.remove()
    return caught


def token_batch(generator: torch.Generator, n: int = 4, t: int = 5, *, targets: bool) -> dict[str, Tensor]:
    """Random ids and right-padded masks of at least one real token."""
    lengths = torch.randint(1, t + 1, (n,), generator=generator)
    lengths[0] = t
    inputs = {
        "ids": torch.randint(VOCABULARY, (n, t), generator=generator),
        "mask": torch.arange(t)[None, :] < lengths[:, None],
    }
    if targets:
        inputs["targets"] = torch.randint(VOCABULARY, (n, t - 1), generator=generator)
    return inputs


def two_texts(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    """Questions and answers of unequal lengths, padded on the right."""
    asked, answered = (torch.arange(1, n + 1)[:, None] > torch.arange(5) - more for more in (3, 1))
    tokens = torch.randint(2, 40, (2, n, 5), generator=generator)
    return {
        "input_ids": tokens[0] * asked,
        "attention_mask": asked.long(),
        "decoder_input_ids": tokens[1] * answered,
        "decoder_attention_mask": answered.long(),
    }


class TinyStack(nn.Module):
    """Patches and a class token through three pre-norm blocks; the feature is the normed class token.

    Takes images [n, 3, h, w] with h and w multiples of 8; returns [n, 16].
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, STACK_WIDTH, 8, stride=8)
        self.class_token = nn.Parameter(torch.randn(1, 1, STACK_WIDTH))
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(3))
        self.norm = nn.LayerNorm(STACK_WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of a batch of images."""
        patches = self.patches(pixels).flatten(2).mT
        hidden = torch.cat([self.class_token.expand(len(pixels), -1, -1), patches], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        features: Tensor = self.norm(hidden[:, 0])
        return features


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(STACK_WIDTH), nn.LayerNorm(STACK_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(STACK_WIDTH, STACK_WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(STACK_WIDTH, 2 * STACK_WIDTH), nn.Linear(2 * STACK_WIDTH, STACK_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (2, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm_2(hidden))))
        return hidden + change


def tiny_stack() -> nn.Module:
    """A `TinyStack` in eval mode, the same each time; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyStack().eval()
