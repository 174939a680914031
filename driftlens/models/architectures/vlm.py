"""Vision-language models of transformers: a vision tower, a projector of its features, and a decoder.

If all tasks are texts, the chain is the decoder's (`causal_chain`). With images, `vision` [n, m, d], zero after the
tokens of smaller images, passes through the tower's blocks; the projector, a layer, puts image features in the place of
image tokens in `hidden` [n, t, d], which passes through the decoder's blocks. Features that are read later (deepstack)
are states too: `vision_<block>` of the tower, and `deepstack_<block>`, added to the output of that decoder block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.alignment import KeyLayout
from driftlens.checkpoints.tensor_sources import CompositeSource, StateSource
from driftlens.checkpoints.unsupported import is_vision_language
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders
from driftlens.models.architectures.encoders import (
    build_language_model,
    ignored_key_patterns,
    key_spellings,
    saved_key_names,
    text_folder_format,
)
from driftlens.models.architectures.language import PADDED, causal_chain, not_causal_error
from driftlens.models.architectures.module_list import (
    ReadRecorder,
    block_layer,
    find_blocks,
    module_path,
    read_weight_names,
)
from driftlens.models.chain import (
    TEXT,
    Layer,
    LayerChain,
    Parameters,
    SideInputs,
    Site,
    State,
    Tap,
    WeightSlot,
)
from driftlens.models.preprocessing import (
    Preprocess,
    hf_image_text_preprocess,
    hf_text_preprocess,
    image_text_example,
)
from driftlens.models.texts import unpad_image_rows
from driftlens.models.tracing.block_call import (
    ForwardRecording,
    RawInputs,
    buffers_on_device,
    call_with_weights,
    padding_mask,
    raw_inputs,
    record_calls,
    replace_outputs,
    run_until_module,
    zeros_like_weights,
)
from driftlens.models.tracing.block_runner import (
    BlockRunner,
    named_weights,
    record_block_inputs,
    run_model,
    state_from_inputs,
)
from driftlens.models.tracing.block_sites import siteless_parameters, sites_in_block, tap_sites
from driftlens.utils.devices import to_device
from driftlens.utils.errors import IncompatibleModelsError, SpecError

_TEXT_ONLY_NOTICE = "all samples are texts, so vision tower and projector did not run and stay as merged"


@dataclass(frozen=True)
class _VlmLayout(KeyLayout):
    """The key layout of vision-language models, and of plain language models with the same decoder.

    `decoder` maps the skeleton's keys of tensors that both have to their names in the plain model, which can be an
    expert: the base provides the tensors that it lacks.
    """

    decoder: Mapping[str, str] = field(default_factory=dict)

    def align(self, source: StateSource, wanted: Collection[str], fallback: StateSource | None) -> StateSource:
        stored = self.key_map(source.headers, wanted, source.name)
        lacking = [key for key in wanted if key not in self.decoder]
        if any(key in stored for key in lacking):
            return super().align(source, wanted, fallback)
        aligned = super().align(source, self.decoder, fallback)
        if fallback is None:
            raise IncompatibleModelsError(
                f"{source.name} is a language model without vision tower ({lacking[0]!r} and {len(lacking) - 1} more "
                "tensors); expected a vision-language model as base",
                hint="Use the vision-language model as base, and this one as an expert.",
            )
        places = {key: (aligned, key) for key in aligned.headers}
        return CompositeSource(source.name, places | {key: (fallback, key) for key in lacking})


@loaders.register("hf-vlm")
def _load_hf_vlm(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a vision-language model; its source is a folder or Hub id."""
    source = request.source
    stated, skeleton = build_language_model(
        request,
        "hf-vlm",
        is_vision_language,
        "a vision-language model",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    )
    decoder = decoder_path(skeleton)
    preprocess = _sample_preprocessing(request, skeleton.config)
    blocks, _ = find_blocks(skeleton.get_submodule(decoder), None)
    chain, lm = causal_chain(skeleton, PADDED, request.blocks or f"{decoder}.{blocks}")
    if preprocess is not None and request.pictured:
        example = image_text_example(preprocess, skeleton.config, source)
        chain = vision_language_chain(skeleton, example, vision_blocks_path(skeleton), chain)
    names, ignored = saved_key_names(skeleton), ignored_key_patterns(skeleton)
    plain = _plain_language_model_names(names, decoder, lm.head)
    return Architecture(
        loader="hf-vlm",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=_VlmLayout([*key_spellings(names, skeleton), plain], ignored=ignored, is_lenient=True, decoder=plain),
        preprocess=preprocess,
        folder=text_folder_format(stated, "AutoModelForImageTextToText", "AutoProcessor"),
        lm=lm,
    )


def _sample_preprocessing(request: ArchitectureRequest, config: Any) -> Preprocess | None:
    """Return the preprocessing of a task's samples; None if no samples are read."""
    if request.unread:
        return None
    if request.pictured:
        return hf_image_text_preprocess(request.source, config, request.access.offline)
    texts = hf_text_preprocess(request.source, config, request.access.offline, "decoder")
    assert texts.texts is not None
    reader = replace(texts.texts, takes_images=True)
    notice = " ".join(filter(None, (texts.notice, _TEXT_ONLY_NOTICE)))
    return replace(texts, transform=reader, texts=reader, notice=notice)


def decoder_path(whole: Any) -> str:
    """Return the path of a model's decoder, which reads embeddings of texts and features of images."""
    path = module_path(whole, whole.get_decoder())
    if not path or whole.get_output_embeddings() is None:
        raise not_causal_error(whole, "it has no decoder with a head")
    return path


def _plain_language_model_names(keys: Collection[str], decoder: str, head: str) -> dict[str, str]:
    """Map the keys of the decoder and its head to their names in a plain language model."""
    before = f"{decoder}."
    names = {key: f"model.{key.removeprefix(before)}" for key in keys if key.startswith(before)}
    ending = head.rpartition(".")[0]
    return names | {key: f"lm_head.{key.removeprefix(f'{ending}.')}" for key in keys if key.startswith(f"{ending}.")}


_TOWER_TENSORS = ("vision_mask", "vision_places", "vision_rows")
_IMAGE_TOKENS = "image_tokens"
# Argument of Qwen3-VL's decoder: features that it adds to the outputs of its first blocks.
_DEEPSTACK = "deepstack_visual_embeds"


def vision_blocks_path(whole: Any) -> str:
    """Return the path of the list of blocks in the vision tower."""
    encoder = whole.get_encoder(modality="image")
    path = module_path(whole, encoder)
    with contextlib.suppress(SpecError):
        if path:
            return f"{path}.{find_blocks(encoder, None)[0]}"
    raise not_causal_error(whole, "it has no vision tower with a list of blocks")


def vision_language_chain(whole: Any, example: Any, tower: str, text_chain: LayerChain) -> LayerChain:
    """Return the layers of a vision-language model, which may be on meta, by a pass over a batch with images.

    Args:
        whole: the library's model with its head.
        example: a batch as `stack_samples` and the tokenizer make it.
        tower: path of the list of the tower's blocks.
        text_chain: the chain of its decoder alone.
    """
    parts = _VisionLanguageRunner(whole, tower, text_chain)
    layers = parts._trace_layers(example)
    return replace(
        text_chain,
        layers=layers,
        start=parts.initial_state,
        library_states=parts.library_states,
        require_shared=parts.require_same_arguments,
        modality=replace(TEXT, pool="last"),
        token_weights={**text_chain.token_weights, "images": lambda _, side: side[_IMAGE_TOKENS]},
        settings={**text_chain.settings, "tower": tower},
    )


class _VisionLanguageRunner(BlockRunner):
    """Runs the blocks of a vision tower, the projector, and the blocks of the decoder."""

    def __init__(self, whole: Any, tower: str, text_chain: LayerChain) -> None:
        _, towers = find_blocks(whole, tower)
        _, decoders = find_blocks(whole, str(text_chain.settings["blocks"]))
        super().__init__(whole, {**towers, **decoders}, None, text_chain.final or "")
        self.count, self.text_chain, self.tower = len(towers), text_chain, tower
        self.decoder, self.image_token = whole.get_decoder(), int(whole.config.image_token_id)
        self.kept: tuple[int, ...] = ()
        self.width = 1

    def initial_state(self, inputs: Any) -> tuple[State, SideInputs]:
        """Return an empty state and the side inputs, which include the pixels of each image."""
        if not _has_images(inputs):
            state, side = self.text_chain.start(inputs)
            unseen = torch.zeros(len(inputs["input_ids"]), 0, dtype=torch.bool)
            tensors = {**side.tensors, "vision_mask": unseen.to(inputs["input_ids"].device)}
            calls: Any = (*[None] * self.count, *side.calls)
            return state, replace(side, tensors=tensors, calls=calls)
        _, side = super().initial_state(unpad_image_rows(inputs))
        return {}, replace(side, tensors={**side.tensors, **self._tower_token_positions(inputs)})

    def library_states(self, module: nn.Module, inputs: Any) -> list[State]:
        sees, named = _has_images(inputs), raw_inputs(unpad_image_rows(inputs))
        side = SideInputs(self._tower_token_positions(inputs) if sees else {})
        past, mask = module.get_submodule(self.final), padding_mask(named, None)
        blocks = [module.get_submodule(path) for path in self.paths[self.count :] if self.carries]
        with (
            _record_decoder_arguments(module.get_decoder()) as arguments,  # type: ignore[operator]
            record_block_inputs(blocks, mask) as entered,
        ):
            recording = self._record_forward_pass(module, named, keep=True, past=past)
        tower, decoder = recording.features[: self.count + 1], recording.features[self.count + 1 :]
        entered = [*[{}] * self.count, *entered]
        states: list[State] = []
        for boundary, native in enumerate(tower):
            vision = _tokens_by_sample(native, side) if sees else native
            rest = {name: value for name, value in (states[-1] if states else {}).items() if name != "vision"}
            rest |= {f"vision_{boundary - 1}": vision} if sees and boundary - 1 in self.kept else {}
            states.append({**rest, "vision": vision})
        deep = _deepstack_features(arguments)
        for boundary, hidden in enumerate(decoder):
            if boundary:
                deep.pop(f"deepstack_{boundary - 1}", None)
            beside = {**deep, **state_from_inputs(self.count + boundary, entered)}
            states.append({**beside, "hidden": self._features_for_state(self.count + boundary, hidden, mask)})
        return [*states, {"hidden": self._model_output_features(recording.output, mask)}]

    def require_same_arguments(self, models: Any, inputs: Any) -> None:
        if _has_images(inputs):
            super().require_same_arguments(models, unpad_image_rows(inputs))
        elif self.text_chain.require_shared is not None:
            self.text_chain.require_shared(models, inputs)

    def run_stem(self, parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        """Embed the image patches: return the state before the first block of the vision tower."""
        if _IMAGE_TOKENS not in side:
            like = next(iter(parameters.values()))
            return {"vision": like.new_zeros(len(side["vision_mask"]), 0, self.width)}
        args, kwargs = side.raw_inputs().arguments({})
        native = run_until_module(self.blocks[0], lambda: call_with_weights(self.module, parameters, args, kwargs))
        return {"vision": _tokens_by_sample(native, side)}

    def _run_tower_block(
        self,
        position: int,
        sites: tuple[Site, ...],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """Return the state after a vision-tower block; taps receive tokens grouped by sample."""
        if _IMAGE_TOKENS not in side:
            return state
        shape = (-1, *side.block_call(position).entered)
        bare = replace(side, tensors={key: x for key, x in side.tensors.items() if key != "hidden_mask"})
        features = {"hidden": _packed_tokens(state["vision"], side).reshape(shape)}
        moves = partial(_tokens_by_sample, side=side), partial(_packed_tokens, side=side)
        inner_tap = None if tap is None else _rearranged_tap(tap, *moves)
        native = super().run_block(position, sites, parameters, features, bare, inner_tap)["hidden"]
        vision = _tokens_by_sample(native, side)
        stored = {f"vision_{position}": vision} if position in self.kept else {}
        return {**state, **stored, "vision": vision}

    def _run_projector(
        self,
        path: str,
        slots: Mapping[str, WeightSlot],
        sites: tuple[Site, ...],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """Project the vision tower's features and return the state before the first decoder block.

        Taps get image features as the decoder has them, [n, t, k], with zeros at other tokens.
        """
        weights = {slots[name].key: value for name, value in parameters.items()}
        if _IMAGE_TOKENS not in side:
            return self._state_after_projector(weights, (), side)
        mask = side[_IMAGE_TOKENS]
        inner_tap = (
            None if tap is None else _rearranged_tap(tap, partial(_features_at_image_tokens, mask), lambda x: x[mask])
        )
        with tap_sites(self.module.get_submodule(path), sites, inner_tap):
            return self._state_after_projector(weights, self._tower_block_outputs(state, side), side)

    def _state_after_projector(self, parameters: Parameters, outputs: Sequence[Any], side: SideInputs) -> State:
        """Run the projector on `outputs` of the tower's blocks, which are empty for texts alone."""
        args, kwargs = side.raw_inputs().arguments({})
        replaced = zip(self.blocks[: self.count], outputs, strict=bool(outputs))
        # The library merges image features into the text itself; only the outputs of the tower are replaced.
        with replace_outputs(replaced), _record_decoder_arguments(self.decoder) as arguments:
            state = self._state_before_block(
                self.count, partial(call_with_weights, self.module, parameters, args, kwargs), side
            )
        return {**_deepstack_features(arguments), **state}

    def _tower_block_outputs(self, state: State, side: SideInputs) -> list[Any]:
        """Return the outputs of the tower's blocks; blocks without a stored output get the last one's."""
        calls = [side.block_call(position) for position in range(self.count)]
        visions = [state.get(f"vision_{position}", state["vision"]) for position in range(self.count)]
        return [
            block_call.wrap_output(_packed_tokens(vision, side).reshape(-1, *block_call.left))
            for block_call, vision in zip(calls, visions, strict=True)
        ]

    def _run_decoder_block(
        self,
        position: int,
        sites: tuple[Site, ...],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """Return the state after a block of the decoder, with its deepstack features added."""
        output = super().run_block(position, sites, parameters, state, side, tap)
        pending = {name: value for name, value in state.items() if name.startswith("deepstack_")}
        added = pending.pop(f"deepstack_{position - self.count}", None)
        return pending | output | ({} if added is None else {"hidden": output["hidden"] + added})

    def _trace_layers(self, example: Any) -> tuple[Layer, ...]:
        """Return all layers, with the weights and sites that one pass finds for each."""
        state, side = self.initial_state(example)
        outer = self.stand_in_weights(next(tensor.device for tensor in side.values()))
        with torch.no_grad():
            with ReadRecorder() as before:
                state = self.run_stem(outer, state, side)
            self.width = state["vision"].shape[-1]
            outputs = self._tower_block_outputs(state, side)
            with ReadRecorder() as between:
                state = self._state_after_projector(outer, outputs, side)
        features = [output if isinstance(output, Tensor) else output[0] for output in outputs[:-1]]
        self.kept = tuple(position for position, x in enumerate(features) if id(x) in between.seen)
        blocks, weights = list[tuple[Site, ...]](), named_weights(self.module)
        for position in range(len(self.blocks)):
            sites, state = self._block_sites(position, weights, side, state)
            blocks.append(sites)
        stem = [name for name in outer if name in read_weight_names(outer, before)]
        projected = [name for name in outer if name in read_weight_names(outer, between)]
        projector = self._projector_layer(
            stem, projected, partial(self._state_after_projector, outer, outputs, side), side
        )
        needs = _IMAGE_TOKENS
        slots = {name: WeightSlot(name) for name in stem}
        layers = [Layer(1, "stem", "stem", slots, self.run_stem, stream="vision", pool="mean", needs=needs)]
        for position, sites in enumerate(blocks):
            if position == self.count:
                layers.append(replace(projector, index=len(layers) + 1))
            is_tower = position < self.count
            run_block = self._run_tower_block if is_tower else self._run_decoder_block
            layer = replace(
                block_layer(self, position, sites, side.calls[position]),
                index=len(layers) + 1,
                call=partial(run_block, position, sites),
            )
            in_tower = replace(layer, stream="vision", pool="mean", needs=needs)
            layers.append(in_tower if is_tower else layer)
        head = self.text_chain.layers[-1]
        return (*layers, replace(head, index=len(layers) + 1, call=self.run_head))

    def _projector_layer(
        self, stem: list[str], projected: list[str], run: Callable[[], State], side: SideInputs
    ) -> Layer:
        """Return the projector's layer; its sites are the modules that run once on every image feature."""
        inner = [name for name in projected if name not in stem]
        path = self._projector_path(inner)
        module, inside = self.module.get_submodule(path), f"{path}."
        slots = {name.removeprefix(inside): WeightSlot(name) for name in projected}
        names = [name.removeprefix(inside) for name in inner if name.startswith(inside)]
        count, rows = int(side[_IMAGE_TOKENS].sum()), dict[str, int]()
        called, _ = sites_in_block(module, names, run, {"hidden": torch.empty(count, 1)})

        def record_num_rows(name: str, x: Tensor) -> None:
            rows[name] = x.numel() // x.shape[-1]

        with tap_sites(module, called, record_num_rows):
            run()
        sites = tuple(
            replace(site, token_weights="images") for site in called if site.runs == 1 and rows[site.name] == count
        )
        layer_call = partial(self._run_projector, path, slots, sites)
        layer = Layer(1, "block", path, slots, layer_call, sites, pool="mean", needs=_IMAGE_TOKENS)
        return replace(layer, no_sites=siteless_parameters(module, names, sites))

    def _projector_path(self, names: list[str]) -> str:
        """Return the path of the projector between vision tower and decoder."""
        table = f"{self.text_chain.layers[0].path}."
        # Numbered modules are blocks or their parts, not the projector.
        single = [name for name in names if not any(map(str.isdecimal, name.split(".")))]
        last = [name for name in single if not name.startswith(table)][-1:] or [table]
        inside, tower = last[0].split("."), self.tower.split(".")
        shared = next((depth for depth, pair in enumerate(zip(inside, tower, strict=False)) if len({*pair}) > 1), 0)
        return ".".join(inside[: shared + 1]).rstrip(".")

    def _block_sites(
        self, position: int, weights: Mapping[str, Tensor], side: SideInputs, state: State
    ) -> tuple[tuple[Site, ...], State]:
        """Return the sites of one block and the state after it, by a run on features of the right shape."""
        block_call, block, is_tower = side.block_call(position), self.blocks[position], position < self.count
        count = len(side["vision_rows"]) if is_tower else len(side["inputs.input_ids"])
        tokens = block_call.entered.numel() // block_call.entered[-1] if is_tower else 1
        # Blocks of a tower may read numbers, such as the lengths of what is packed; a decoder's are too large for that.
        bare = self.is_on_meta and not is_tower
        device = torch.device("meta") if bare else side["inputs.input_ids"].device
        features = {name: value.to(device) for name, value in state.items()}
        shape = (count // tokens, *block_call.entered)
        features["hidden"] = torch.zeros(shape, device=device, dtype=block_call.dtype)
        if is_tower:
            zeros = zeros_like_weights(block, features["hidden"])
            weights = {**weights} | {f"{self.paths[position]}.{name}": zero for name, zero in zeros.items()}
        tensors = {key: tensor.to(device) for key, tensor in side.tensors.items() if key != "hidden_mask"}
        with buffers_on_device(self.module, device) if bare else contextlib.nullcontext():
            sites, after = self.find_sites(position, weights, features, replace(side, tensors=tensors))
        return sites, state if is_tower else after

    def _record_forward_pass(
        self,
        module: nn.Module,
        inputs: RawInputs,
        *,
        keep: bool = False,
        past: nn.Module | None = None,
        outer: Parameters | None = None,
    ) -> ForwardRecording:
        """Record a forward pass; features that the model adds after blocks of the decoder are part of their output."""

        forward = self._forward_pass_function(module, inputs, past, outer)
        blocks = [(path, module.get_submodule(path)) for path in self.paths]
        if not _has_images(inputs.values):
            texts = record_calls(dict(blocks[self.count :]), forward, keep=keep, added_from=0)
            unseen = [x.new_zeros(len(x), 0, self.width) for x in texts.features[:1] * (self.count + 1)]
            return ForwardRecording(features=[*unseen, *texts.features], output=texts.output)
        starts = (0, self.count)
        return self._remove_state_arguments(
            record_calls(dict(blocks), forward, keep=keep, starts=starts, added_from=self.count)
        )

    def _tower_token_positions(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the positions of each sample's tokens in the tower; see `_tokens_by_sample`."""
        # Sample by sample, because libraries pack the images of a batch and do not return their lengths.
        counts = [self._num_tower_tokens(batch, row) for row in range(len(batch["input_ids"]))]
        longest, device = max(counts), batch["input_ids"].device
        ends = torch.tensor(counts).cumsum(0)
        within = torch.arange(longest)[None]
        mask = within < torch.tensor(counts)[:, None]
        places = ((ends - torch.tensor(counts))[:, None] + within).where(mask, 0)
        rows = mask.flatten().nonzero()[:, 0]
        # Some processors pad the patches of small images, whose positions are negative then.
        if "image_position_ids" in batch:
            is_patch = (unpad_image_rows(batch)["image_position_ids"] >= 0).all(dim=-1).flatten().cpu()
            mask = mask & is_patch[places]
        at_images = torch.eq(batch["input_ids"].cpu(), self.image_token)
        tensors = dict(zip(_TOWER_TENSORS, (mask, places, rows), strict=True)) | {_IMAGE_TOKENS: at_images}
        # Without a mask, features need not be filled on every layer.
        if bool(mask.all()):
            del tensors["vision_mask"]
        return {name: to_device(tensor, device) for name, tensor in tensors.items()}

    def _num_tower_tokens(self, batch: Mapping[str, Tensor], row: int) -> int:
        """Return the number of vision-tower tokens of one sample's images."""
        sample = {name: value[row : row + 1] for name, value in batch.items()}
        named, device = raw_inputs(unpad_image_rows(sample)), sample["input_ids"].device
        outer = self.stand_in_weights(device) if self.is_on_meta else None
        native = run_until_module(self.blocks[0], lambda: run_model(self.module, named, outer))
        if native.dim() > 3:
            raise not_causal_error(
                self.module,
                "its vision tower is convolutional, with features in space",
                "Use tasks of texts (without `image`); the tower stays as merged.",
            )
        return native.numel() // native.shape[-1]


def _has_images(inputs: Any) -> bool:
    return any(name.startswith("pixel_values") for name in inputs)


def _tokens_by_sample(native: Tensor, side: SideInputs) -> Tensor:
    """Group the tower's packed tokens by sample, [n, m, d] or [n, m, heads, d], padded with zeros."""
    count, size = len(side["vision_rows"]), native.shape[-1]
    # Modules inside attention may read features by heads, [r, h, d].
    heads = () if native.numel() == count * size else native.shape[-2:-1]
    rows = native.reshape(count, *heads, size)[side["vision_places"]]
    mask = side.mask("vision")
    return rows if mask is None else rows.masked_fill(~mask.reshape(*mask.shape, *[1] * (rows.dim() - 2)), 0)


def _packed_tokens(vision: Tensor, side: SideInputs) -> Tensor:
    """Pack the vision tokens of all samples without padding, [r, d]; inverts `_tokens_by_sample`."""
    return vision.flatten(0, 1)[side["vision_rows"]]


def _features_at_image_tokens(mask: Tensor, rows: Tensor) -> Tensor:
    """Put consecutive image features [..., d] at the image tokens of `mask`, [n, t, d], with zeros elsewhere."""
    # Image features have no sample axis: the k-th of a batch belongs to its k-th image token.
    places = mask.flatten().cumsum(0).reshape(mask.shape).sub(1).clamp_min(0)
    return rows.reshape(-1, rows.shape[-1])[places].masked_fill(~mask[..., None], 0)


def _rearranged_tap(tap: Tap, by_sample: Callable[[Tensor], Tensor], pack: Callable[[Tensor], Tensor]) -> Tap:
    """Wrap a tap so that it receives packed tokens grouped by sample."""

    def tap_input(name: str, native: Tensor) -> Any:
        hear = tap(name, by_sample(native))
        if hear is None:
            return None
        if isinstance(hear, Tensor):
            return pack(hear).reshape(*native.shape[:-1], -1)

        def tap_output(output: Tensor) -> Tensor | None:
            changed = hear(by_sample(output))
            return None if changed is None else pack(changed).reshape(output.shape)

        return tap_output

    return tap_input


@contextlib.contextmanager
def _record_decoder_arguments(decoder: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield a dictionary that receives the keyword arguments of the decoder's calls."""
    arguments: dict[str, Any] = {}
    hook = decoder.register_forward_pre_hook(
        lambda _module, _args, kwargs: arguments.update(kwargs), with_kwargs=True, prepend=True
    )
    with hook:
        yield arguments


def _deepstack_features(arguments: Mapping[str, Any]) -> State:
    """Return the features [n, t, d] that the decoder adds after its first blocks, with zeros at texts."""
    return {
        f"deepstack_{number}": _features_at_image_tokens(arguments["visual_pos_masks"], values)
        for number, values in enumerate(arguments.get(_DEEPSTACK) or ())
    }
