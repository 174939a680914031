"""Models to calibrate, each beside blocks that the slow reference understands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5LayerNorm

from driftlens.models.architectures.language import causal_chain
from driftlens.models.chain import adapters
from tests.reference import decoder, t5
from tests.reference.calibration import PlainBlock
from tests.reference.drift import STEPS
from tests.zoo.cases import CASES, Case, Stack, perturbed, rows, stack_chain, with_seed
from tests.zoo.hand_made import two_texts
from tests.zoo.small import TINY

Inputs = Any


def normed(width: int) -> list[nn.Module]:
    return [nn.RMSNorm(width), nn.Linear(width, width, bias=False)]


@dataclass(frozen=True)
class World:
    """One architecture as the product and as the reference see it.

    Attributes:
        case: how to build, take apart and feed it.
        blocks: a model's blocks, as plain modules.
        names: the product's name of a site inside its block -> the reference's, where they differ.
        enter: (model, inputs of one batch, sample) -> what enters the first block.
        run: (block, that state, inputs, sample) -> the state that leaves it.
    """

    case: Case
    blocks: Callable[[nn.Module], list[nn.Module]]
    enter: Callable[[nn.Module, Inputs, int], Any]
    run: Callable[[nn.Module, Any, Inputs, int], Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plain_block(weights: Mapping[str, Tensor], names: Mapping[str, str], heads: int, eps: float) -> PlainBlock:
    inner, width = weights[f"{_of(names, 'fc1')}.weight"].shape
    block = PlainBlock(width, inner, heads, eps).double()
    state = {f"{theirs}.{part}": weights[f"{ours}.{part}"] for ours, theirs in names.items() for part in PARTS}
    block.load_state_dict(state)
    return block


PARTS = ("weight", "bias")
OPEN_CLIP_NAMES = {
    "ln_1": "norm1",
    "attn.q_proj": "q",
    "attn.k_proj": "k",
    "attn.v_proj": "v",
    "attn.out_proj": "out",
    "ln_2": "norm2",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
HF_NAMES = {
    "layer_norm1": "norm1",
    **{f"self_attn.{name}_proj": name for name in ("q", "k", "v", "out")},
    "layer_norm2": "norm2",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}


def _of(names: Mapping[str, str], wanted: str) -> str:
    return next(ours for ours, theirs in names.items() if theirs == wanted)


def open_clip_blocks(tower: nn.Module) -> list[nn.Module]:
    found = []
    for block in tower.transformer.resblocks:
        weights = dict(block.state_dict())
        for part in PARTS:
            thirds = weights[f"attn.in_proj_{part}"].chunk(3)
            weights |= {f"attn.{n}_proj.{part}": w for n, w in zip("qkv", thirds, strict=True)}
        found.append(plain_block(weights, OPEN_CLIP_NAMES, block.attn.num_heads, block.ln_1.eps))
    return found


def hf_blocks(model: nn.Module) -> list[nn.Module]:
    return [
        plain_block(block.state_dict(), HF_NAMES, block.self_attn.num_heads, block.layer_norm1.eps)
        for block in getattr(model, "vision_model", model).encoder.layers
    ]


def first_step(name: str) -> Callable[[nn.Module, Inputs, int], Tensor]:
    return lambda model, inputs, sample: STEPS[name](model)[0](inputs[sample : sample + 1])[0]


def of_one_tensor(block: nn.Module, hidden: Tensor, inputs: Inputs, sample: int) -> Tensor:
    return block(hidden)


class ExactNorm(T5LayerNorm):
    """The library takes the mean square in float32, whatever the dtype; here that would be all there is to see."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)


def exact_t5() -> nn.Module:
    model = TINY["seq2seq"]()
    for module in model.modules():
        if isinstance(module, T5LayerNorm):
            module.__class__ = ExactNorm
    return model


def enter_t5(model: nn.Module, inputs: Inputs, sample: int) -> t5.State:
    """Tokens of one sample alone: where the batch pads it, the reference has none."""
    ids = (inputs[f"{stack}input_ids"][sample] for stack in ("", "decoder_"))
    masks = (inputs[f"{stack}attention_mask"][sample].bool() for stack in ("", "decoder_"))
    encoded, hidden = (model.shared.weight[row[mask]] for row, mask in zip(ids, masks, strict=True))
    return encoded, hidden


class ExactRMSNorm(LlamaRMSNorm):
    """As `ExactNorm`."""

    forward = ExactNorm.forward


class ExactRotary(LlamaRotaryEmbedding):
    """The library's angles are of float32, whatever the dtype."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        steps = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = position_ids[..., None] / self.config.rope_parameters["rope_theta"] ** steps.repeat(2)
        return angles.cos().to(x), angles.sin().to(x)


def exact_decoder(model_class: Any, config_class: Any) -> Callable[[], nn.Module]:
    """Builds a model of four heads, every two of which share keys and values; its head is its embeddings."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": 40,
        "head_dim": 4,
    }
    config = config_class(
        **sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, tie_word_embeddings=True
    )

    def build() -> nn.Module:
        model: nn.Module = model_class(config)
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.__class__ = ExactRMSNorm
            elif hasattr(module, "inv_freq"):
                module.__class__ = ExactRotary
        return perturbed(model, 0, 0.2)

    return with_seed(build)


def questions(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    return {name: value for name, value in two_texts(generator, n).items() if "decoder" not in name}


def decoder_world(model_class: Any, config_class: Any) -> World:
    """Of samples without their padding, as `enter_t5`."""
    return World(
        Case(
            exact_decoder(model_class, config_class),
            lambda model: causal_chain(model, questions(torch.Generator().manual_seed(0), 2))[0],
            questions,
        ),
        decoder.blocks,
        lambda model, inputs, i: model.model.embed_tokens.weight[
            inputs["input_ids"][i][inputs["attention_mask"][i].bool()]
        ],
        of_one_tensor,
        decoder.NAMES,
    )


WORLDS: dict[str, World] = {
    "llama": decoder_world(LlamaForCausalLM, LlamaConfig),
    "qwen3": decoder_world(Qwen3ForCausalLM, Qwen3Config),
    "t5": World(
        Case(exact_t5, adapters["seq2seq"].chain, two_texts),
        t5.blocks,
        enter_t5,
        lambda block, state, inputs, sample: block(state),
        t5.names(),
    ),
    "open_clip_vit": World(
        CASES["open_clip_vit"], open_clip_blocks, first_step("open_clip_vit"), of_one_tensor, OPEN_CLIP_NAMES
    ),
    "hf_clip_vit": World(CASES["hf_clip_vit"], hf_blocks, first_step("hf_clip_vit"), of_one_tensor, HF_NAMES),
    "sequential": World(
        CASES["sequential"], lambda model: list(model.blocks), first_step("sequential"), of_one_tensor
    ),
    "rms_stack": World(
        Case(with_seed(lambda: Stack(depth=2, parts=normed)), stack_chain, rows(5)),
        lambda model: list(model.blocks),
        first_step("sequential"),
        of_one_tensor,
    ),
}
