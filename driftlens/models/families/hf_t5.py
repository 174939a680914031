"""T5 of transformers (v1.0, v1.1, FLAN), taken apart with both of its streams.

`encoder` [n, t, d] flows through the encoder's blocks and its final norm, which is a layer of its own; `hidden`
[n, u, d] through the decoder's blocks, each of which reads the finished `encoder`. The head is the decoder's final
norm: scores are made of what leaves it by `lm_head`, which belongs to no layer. Blocks run as the library's own
modules. The table of relative positions that the library keeps in a stack's first block is a parameter of all its
blocks, so that every block is a function of its own model's weights and of features alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.base.errors import DataError, IncompatibleModelsError
from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.refusals import LIVE
from driftlens.models.architecture import (
    Architecture,
    ArchitectureRequest,
    loaders,
    weightless,
)
from driftlens.models.chain import (
    TEXT,
    Layer,
    LayerChain,
    Parameters,
    Pool,
    Role,
    SideInputs,
    Site,
    Slot,
    State,
    Tap,
    adapters,
)
from driftlens.models.families.hf_auto import read_plain_config, usage_of_texts
from driftlens.models.families.vit import scrambled
from driftlens.models.frames import raw_inputs, result, without_padding
from driftlens.models.heads import LmScores
from driftlens.models.language.vocabularies import HEAD
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.saving import FolderFormat
from driftlens.models.taking_apart.dissection import run, tied_weights
from driftlens.models.taking_apart.interception import call, observe
from driftlens.models.taking_apart.sites import BLOCK_ITSELF, no_sites, tapped

NAME = "hf_t5"
EMBEDDINGS = "shared.weight"
_STACKS = {"encoder": "encoder", "decoder": "hidden"}
"""Of each stack, the stream that flows through it; its mask is `<stream>_mask`, its tokens `<stream>_ids`."""
_POOLS: dict[str, Pool | None] = {"encoder": "mean", "decoder": None}
_TABLE = "layer.0.SelfAttention.relative_attention_bias.weight"


class HfT5:
    """transformers' T5, taken apart."""

    name = NAME

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is an encoder and a decoder of T5's blocks over the same embeddings."""
        return _why_not(module) is None

    def chain(self, module: nn.Module) -> LayerChain:
        """The model taken apart; keys are those of `module.state_dict()`."""
        reason = _why_not(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this {type(module).__name__} can't be taken apart as a T5: {reason}", hint=LIVE
            )
        whole: Any = module
        layers = [
            Layer(1, "stem", "shared", {EMBEDDINGS: Slot(EMBEDDINGS)}, _stem, stream="encoder", pool="mean")
        ]
        for stack in _STACKS:
            for number, block in enumerate(whole.get_submodule(stack).block):
                layers.append(_block(block, stack, number, len(layers) + 1))
            layers.append(_norm(whole.get_submodule(stack).final_layer_norm, stack, len(layers) + 1))
        read = partial(
            _read,
            start_token=getattr(whole.config, "decoder_start_token_id", None) or 0,
            num_tokens=len(whole.shared.weight),
        )
        return LayerChain(
            architecture=NAME,
            layers=tuple(layers),
            start=lambda inputs: ({}, _side(read(inputs))),
            library_states=lambda module, inputs: _library_states(module, read(inputs)),
            tied=tied_weights(module),
            settings={
                "activation": whole.config.feed_forward_proj,
                "num_heads": whole.config.num_heads,
                "eps": whole.config.layer_norm_epsilon,
            },
            modality=replace(TEXT, pool="last"),
            final=layers[-1].path,
        )

    def tiny(self) -> nn.Module:
        """FLAN's form: 2 + 2 blocks of width 16 over 40 tokens, gated, its `lm_head` apart from the embeddings."""
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=6,
            d_ff=24,
            num_layers=2,
            num_heads=3,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            feed_forward_proj="gated-gelu",
            scale_decoder_outputs=False,
            decoder_start_token_id=0,
        )

        def build() -> nn.Module:
            model: Any = T5ForConditionalGeneration(config)
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
            return cast("nn.Module", model)

        return scrambled(build)


adapters.register(NAME)(HfT5())


def _why_not(module: nn.Module) -> str | None:
    whole: Any = module
    parts = dict(module.named_parameters(remove_duplicate=False))
    for stack in _STACKS:
        if f"{stack}.block.0.{_TABLE}" not in parts or f"{stack}.final_layer_norm.weight" not in parts:
            return f"it has no {stack} with relative positions"
        if parts.get(f"{stack}.embed_tokens.weight") is not parts.get(EMBEDDINGS):
            return f"its {stack} has embeddings of its own"
        for number, block in enumerate(whole.get_submodule(stack).block):
            names = {key for key, _ in block.named_parameters()} - ({_TABLE} if number == 0 else set())
            wanted = {f"{site}.weight" for site in _sites_of(block, stack)}
            if odd := sorted(names ^ wanted):
                return f"{stack}.block.{number} is not T5's (extra or missing: {', '.join(odd)})"
    return None


def _sites_of(block: nn.Module, stack: str) -> dict[str, str]:
    """The modules of a block that have weights, in the order in which they run -> what each reads."""
    attention, cross, norm = "layer.0.SelfAttention", "layer.1.EncDecAttention", "layer.{}.layer_norm".format
    inputs = (
        {norm(0): stack}
        | {f"{attention}.{part}": norm(0) for part in "qkv"}
        | {f"{attention}.o": f"{attention}.mixed"}
    )
    last = 1
    if stack == "decoder":
        last = 2
        inputs |= {norm(1): "layer.1", f"{cross}.q": norm(1)}
        inputs |= {f"{cross}.{part}": "encoder" for part in "kv"} | {f"{cross}.o": f"{cross}.mixed"}
    feed = f"layer.{last}.DenseReluDense"
    is_gated = any(name == f"{feed}.wi_0" for name, _ in block.named_modules())
    inputs |= {norm(last): f"layer.{last}"}
    inputs |= {f"{feed}.{part}": norm(last) for part in (("wi_0", "wi_1") if is_gated else ("wi",))}
    return inputs | {f"{feed}.wo": f"{feed}.inner"}


def _block(block: Any, stack: str, number: int, index: int) -> Layer:
    path = f"{stack}.block.{number}"
    eps = block.layer[0].layer_norm.variance_epsilon
    sites = tuple(
        _norm_site(name, reads, eps)
        if name.endswith("layer_norm")
        # What keys and values of cross-attention read are the encoder's tokens.
        else Site(
            name, "linear", reads, mixes_tokens=name[-2:] in (".k", ".v"), stream=reads * (reads == "encoder")
        )
        for name, reads in _sites_of(block, stack).items()
    )
    slots = {f"{site.name}.weight": Slot(f"{path}.{site.name}.weight") for site in sites}
    slots[_TABLE] = Slot(f"{stack}.block.0.{_TABLE}")
    alone = no_sites(block, slots, sites) if number == 0 else {}
    return Layer(
        index,
        "block",
        path,
        slots,
        partial(_run_block, block, stack, path, sites),
        sites,
        _STACKS[stack],
        _POOLS[stack],
        is_residual=True,
        no_sites=alone,
    )


def _norm_site(name: str, reads: str, eps: float) -> Site:
    return Site(name, "rms_norm", reads, eps=eps, only_named=True)


def _norm(module: Any, stack: str, index: int) -> Layer:
    """The final norm of a stack: of the encoder a layer between two blocks, of the decoder the head."""
    path, sites = f"{stack}.final_layer_norm", (_norm_site(BLOCK_ITSELF, stack, module.variance_epsilon),)
    slots = {f"{BLOCK_ITSELF}.weight": Slot(f"{path}.weight")}
    role: Role = "block" if stack == "encoder" else "head"
    run_norm = partial(_run_norm, module, stack, sites)
    return Layer(index, role, path, slots, run_norm, sites, _STACKS[stack], _POOLS[stack])


def _stem(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
    """What both stacks make of their tokens."""
    table = parameters[EMBEDDINGS]
    return {
        stream: without_padding("shared", F.embedding(side[f"{stream}_ids"], table), side.mask(stream))
        for stream in _STACKS.values()
    }


def _run_block(
    block: Any,
    stack: str,
    path: str,
    sites: Sequence[Site],
    parameters: Parameters,
    state: State,
    side: SideInputs,
    tap: Tap | None = None,
) -> State:
    stream = _STACKS[stack]
    hidden, mask, read = state[stream], side.mask(stream), side.mask("encoder")
    bias = _position_bias(block.layer[0].SelfAttention, parameters[_TABLE], hidden.shape[1], stack)
    lowest = torch.finfo(hidden.dtype).min
    allowed = bias.new_ones(bias.shape[-2:], dtype=torch.bool)
    allowed = allowed.tril() if stack == "decoder" else allowed
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    # Masks are handed over as part of the biases, which no version of the library masks a second time.
    given: dict[str, Any] = {"position_bias": torch.where(allowed, bias, lowest)}
    if stack == "decoder":
        given["encoder_hidden_states"] = state["encoder"]
        if read is not None:
            given["encoder_decoder_position_bias"] = torch.where(read, bias.new_zeros(()), lowest)[
                :, None, None
            ]
    weights = {name: value for name, value in parameters.items() if name != _TABLE}
    with tapped(block, sites, tap):
        hidden = call(block, weights, (hidden,), given)[0]
    return {**state, stream: without_padding(path, hidden, mask)}


def _position_bias(attention: Any, table: Tensor, length: int, stack: str) -> Tensor:
    """What self-attention adds to its scores by how far apart tokens are, [1, heads, length, length]."""
    places = torch.arange(length, device=table.device)
    buckets = attention._relative_position_bucket(
        places[None] - places[:, None],
        bidirectional=stack == "encoder",
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return F.embedding(buckets, table).permute(2, 0, 1)[None]


def _run_norm(
    module: nn.Module,
    stack: str,
    sites: Sequence[Site],
    parameters: Parameters,
    state: State,
    side: SideInputs,
    tap: Tap | None = None,
) -> State:
    stream = _STACKS[stack]
    with tapped(module, sites, tap):
        normed = call(module, {"weight": parameters[f"{BLOCK_ITSELF}.weight"]}, (state[stream],), {})
    return {**state, stream: normed} if stack == "encoder" else {stream: normed}


def _read(inputs: Any, *, start_token: int, num_tokens: int) -> dict[str, Tensor]:
    """A batch as the library takes it: tokens and masks of both stacks, the decoder's start alone where it has none."""
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    tokens = given.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise DataError(
            f"a batch is a {type(inputs).__name__} without input_ids [n, t]; a T5 wants a dict with these",
            hint="It reads input_ids, attention_mask and the same with decoder_ before, as its tokenizer gives them.",
        )
    start = tokens.new_full((len(tokens), 1), start_token)
    batch: dict[str, Tensor] = {}
    for stack, ids in (("", tokens), ("decoder_", given.get("decoder_input_ids", start))):
        mask = given.get(f"{stack}attention_mask")
        batch[f"{stack}input_ids"] = ids
        batch[f"{stack}attention_mask"] = torch.ones_like(ids) if mask is None else mask.long()
        if not bool(((ids >= 0) & (ids < num_tokens)).all()):
            raise DataError(
                f"{stack}input_ids has tokens {int(ids.min())} to {int(ids.max())}; the model knows {num_tokens}",
                hint="Give what the tokenizer of these models makes of texts; -100 in labels is no token.",
            )
    return batch


def _side(batch: Mapping[str, Tensor]) -> SideInputs:
    """Tokens of both streams, and masks where something is padded."""
    tensors = {}
    for stream, name in (("encoder", ""), ("hidden", "decoder_")):
        tensors[f"{stream}_ids"] = batch[f"{name}input_ids"]
        mask = batch[f"{name}attention_mask"].bool()
        if not bool(mask.all()):
            tensors[f"{stream}_mask"] = mask
    return SideInputs(tensors)


def _library_states(module: nn.Module, batch: Mapping[str, Tensor]) -> list[State]:
    """What enters the first blocks and leaves blocks and norms in one ordinary pass, which makes no scores."""
    whole, side = cast("Any", module), _side(batch)

    def features(stack: str, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        blocks = {f"{stack}.block.{at}": block for at, block in enumerate(whole.get_submodule(stack).block)}
        seen = observe(blocks, partial(run, whole.get_submodule(stack), raw_inputs(given)), keep=True)
        output, mask = result(seen.output), side.mask(_STACKS[stack])
        return output, [without_padding(stack, hidden, mask) for hidden in (*seen.features, output)]

    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    read, encoded = features("encoder", asked)
    answered = {name: batch[f"decoder_{name}"] for name in asked}
    answered |= {"encoder_hidden_states": read, "encoder_attention_mask": asked["attention_mask"]}
    _, (first, *decoded) = features("decoder", answered)
    return [
        *({"encoder": hidden, "hidden": first} for hidden in encoded),
        *({"encoder": encoded[-1], "hidden": hidden} for hidden in decoded[:-1]),
        {"hidden": decoded[-1]},
    ]


@loaders.register("hf-t5")
def load_hf_t5(request: ArchitectureRequest) -> Architecture:
    """The architecture of a T5, v1.0 or v1.1 (FLAN); its source is a folder or Hub id."""
    source = request.source
    stated = read_plain_config(request, "hf-t5")
    skeleton, is_tied = _skeleton(stated, source)
    chain, offline = HfT5().chain(skeleton), request.access.offline
    preprocess = hf_text_preprocess(source, skeleton.config, offline, "encoder-decoder")
    return Architecture(
        loader="hf-t5",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=_layout(skeleton, is_tied),
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors", {"config.json": stated}, usage=partial(usage_of_texts, _USAGE)
        ),
        lm=lm_scores(skeleton.config, chain),
    )


def lm_scores(config: Any, chain: LayerChain) -> LmScores:
    """Where the head of a T5 lies; features are scaled in its first version."""
    scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
    return LmScores(chain.tied.get(HEAD, (HEAD,))[0], scale=scale)


def _skeleton(stated: Mapping[str, Any], source: str) -> tuple[Any, bool]:
    """The model with shapes only, and whether the embeddings are its `lm_head` too."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config.from_dict(dict(stated))
    # Of files of any version, version 5 keeps here whether the two are one; in memory it says that they always are.
    is_tied = bool(config.scale_decoder_outputs)

    config._attn_implementation = "sdpa"
    model = weightless(lambda: T5ForConditionalGeneration(config), source)
    stacks = (model.encoder.embed_tokens, model.decoder.embed_tokens)
    for part in (*stacks, *([model.lm_head] if is_tied else [])):  # without weights, the library ties nothing
        part.weight = model.shared.weight
    return model, is_tied


def _layout(skeleton: nn.Module, is_tied: bool) -> Spellings:
    """Names in files, which hold the embeddings under one name or several; the library reads `shared` first."""
    copies = [f"{stack}.embed_tokens.weight" for stack in _STACKS]
    left_out = [*copies, HEAD] if is_tied else copies
    plain = {key: key for key in skeleton.state_dict() if key not in left_out}
    spellings = [plain, *({**plain, EMBEDDINGS: copy} for copy in copies)]
    return Spellings(spellings, tuple(left_out), ("EncDecAttention.relative_attention_bias",))


_USAGE = """\
from transformers import AutoTokenizer, T5ForConditionalGeneration

folder = "."  # this one, or the model's id on the Hub
model, tokenizer = T5ForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(["a prompt"], return_tensors="pt")
answers = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
"""
