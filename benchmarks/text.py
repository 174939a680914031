"""Cost of the exact decomposition and of FeatCal for language models, relative to the library's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figures import record
from benchmarks.timing import best_of
from driftlens.calibration.featcal import PRESETS, FeatCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches, drift_columns, walk
from driftlens.models.architecture import build_on_meta
from driftlens.models.architectures.language import causal_chain
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import LayerChain

TOKENS, ANSWER, BATCH = 128, 8, 8
TASKS, SAMPLES = 4, 16
VOCABULARY = 32_000
SHAPE: Mapping[str, int] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 768, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "num_key_value_heads": 4},
}


def run(device: str) -> None:
    """Record the cost of decomposing a decoder's and a mixture's drift, and of FeatCal on an encoder-decoder."""
    where = torch.device(device)
    _dense(where)
    _mixture(where)
    _featcal(where)


def _dense(device: torch.device) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _decomposition(LlamaForCausalLM, LlamaConfig(intermediate_size=2048, **SHAPE), "decoder", 1.3, device)


def _mixture(device: torch.device) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2, **SHAPE)
    _decomposition(MixtralForCausalLM, config, "mixture of 8 experts, 2 active,", 1.4, device)


@torch.no_grad()
def _decomposition(kind: type[nn.Module], config: Any, title: str, wanted: float, device: torch.device) -> None:
    """Record the walk with all columns over three passes of the library: both models, and the merged one once more."""
    models = {name: _near(kind, config, seed, device) for seed, name in enumerate(("expert:a", "merged"))}
    batches = _batches(0, device, answer=0)
    # As files are opened: what is shared by all models has no weights.
    skeleton = build_on_meta(lambda: kind(config), "decoder")
    pool = _pool(models, skeleton, causal_chain(skeleton, batches[0].inputs)[0])

    def decomposition() -> None:
        for view in walk(pool, "a", ["merged"], batches):
            torch.stack(list(drift_columns(view, "last").values())).cpu()

    def bare() -> None:
        for name in ("expert:a", "merged", "merged"):
            for batch in batches:
                models[name].get_decoder()(**batch.inputs, use_cache=False)

    seconds = best_of({"decomposition": decomposition, "bare": bare}, rounds=3)
    ratio = seconds["decomposition"] / seconds["bare"]
    figure = (
        f"decomposition of one variant against three forward passes, {title} of 12 x 768, {SAMPLES} texts of {TOKENS}"
    )
    record("text", f"{figure} tokens", f"{ratio:.2f} times", f"at most {wanted} times", device=str(device))


def _featcal(device: torch.device) -> None:
    """Both ways in turns, with the settings published for FLAN-T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=768,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    names = ["base", "merged", *(f"expert:{task}" for task in range(TASKS))]
    models = {name: _near(T5ForConditionalGeneration, config, seed, device) for seed, name in enumerate(names)}
    samples = {str(task): _batches(task, device, answer=ANSWER) for task in range(TASKS)}
    pool = _pool(models, models["merged"], chain_of_module(models["merged"]))
    found: dict[str, Any] = {}

    def ours() -> None:
        read = {task: InMemoryBatches(lambda batches=batches: batches) for task, batches in samples.items()}
        calibrator = FeatCal(**PRESETS["flan-t5"])
        sites = select_sites(pool.chain, update=calibrator.update)
        found["ours"] = list(calibrator.calibrate(CalibrationContext(pool, read, sites, objectives=False)))

    def theirs() -> None:
        found["theirs"] = reference(models, samples, **PRESETS["flan-t5"])

    seconds = best_of({"ours": ours, "theirs": theirs}, rounds=2, warm_up=False)
    gap = _largest_gap(pool, found["ours"], found["theirs"])
    case = f"FeatCal, shape of T5-base, {TASKS} tasks of {SAMPLES} texts of {TOKENS} + {ANSWER} tokens"
    faster = f"{seconds['theirs'] / seconds['ours']:.2f} times faster ({seconds['ours']:.1f} s)"
    record("text", f"{case}, against hooks on the modules", faster, "at least 1.3 times", device=str(device))
    record("text", f"{case}: largest relative difference of weights", f"{gap:.1e}", device=str(device))


def _near(kind: type[nn.Module], config: Any, seed: int, device: torch.device) -> Any:
    """A random model; those of other seeds lie near it, as fine-tuning and merging leave them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def _pool(models: Mapping[str, nn.Module], skeleton: nn.Module, chain: LayerChain) -> ModelPool:
    sources = {name: module_source(module, name) for name, module in models.items()}
    device = next(models["merged"].parameters()).device
    return ModelPool(chain, skeleton, sources, device=device, dtype=torch.float32)


def _batches(seed: int, device: torch.device, *, answer: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(5, VOCABULARY, (BATCH, length), generator=generator).to(device)

    batches = []
    for start in range(0, SAMPLES, BATCH):
        question = ids(TOKENS)
        inputs = {"input_ids": question, "attention_mask": torch.ones_like(question)}
        if answer:
            follows = ids(answer)
            inputs |= {"decoder_input_ids": follows, "decoder_attention_mask": torch.ones_like(follows)}
        batches.append(Batch(start, start + BATCH, inputs))
    return batches


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block was called with."""


@torch.no_grad()
def reference(
    models: Mapping[str, Any],
    samples: Mapping[str, list[Batch]],
    *,
    lam: float,
    rho: float,
    alpha: float,
    eps: float = 1e-8,
    **_: Any,
) -> dict[str, Tensor]:
    """FeatCal the straightforward way: new weights of all linear modules of T5's blocks, by name in the model.

    One pass of each model notes what its blocks are called with. Block by block, hooks on its linear modules give
    their inputs; sums and solves are in float64, one Gram matrix and one solve for each module; the block with its new
    weights gives what the next one is called with.
    """
    start, merged = models["base"], models["merged"]
    new: dict[str, Tensor] = {}
    blocks = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(len(merged.encoder.block))]
    mine = {task: [_calls(merged, blocks, batch) for batch in batches] for task, batches in samples.items()}
    theirs = {
        task: [_calls(models[f"expert:{task}"], blocks, batch) for batch in batches]
        for task, batches in samples.items()
    }
    for index, path in enumerate(blocks):
        block = merged.get_submodule(path)
        linear = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        left, right = dict[str, Any].fromkeys(linear, 0.0), dict[str, Any].fromkeys(linear, 0.0)
        for task in samples:
            expert = models[f"expert:{task}"].get_submodule(path)
            gram: dict[str, Any] = dict.fromkeys(linear, 0.0)
            cross: dict[str, Any] = dict.fromkeys(linear, 0.0)
            rows = dict.fromkeys(linear, 0)
            for ours, wanted in zip(mine[task], theirs[task], strict=True):
                with _inputs(block) as seen:
                    _run(block, ours[path])
                with _inputs(expert) as target:
                    _run(expert, wanted[path])
                for name in linear:
                    x, e = (rows_of[name].flatten(0, 1).double() for rows_of in (seen, target))
                    gram[name] += x.T @ x
                    cross[name] += (alpha * e + (1 - alpha) * x).T @ x
                    rows[name] += len(x)
            for name in linear:
                mean = gram[name] / rows[name]
                omega = 1 / mean.norm().clamp_min(eps)
                left[name] += omega * mean
                weight = expert.get_submodule(name).weight.double()
                right[name] += omega * weight @ (cross[name] / rows[name])
        kept = {name: module.weight.data for name, module in linear.items()}
        for name, module in linear.items():
            anchor = torch.lerp(start.get_submodule(f"{path}.{name}").weight.double(), module.weight.double(), rho)
            system = left[name] + lam * torch.eye(len(left[name]), dtype=torch.float64, device=anchor.device)
            weight = torch.linalg.solve(system, right[name] + lam * anchor, left=False)
            new[f"{path}.{name}.weight"] = weight.to(module.weight)
            module.weight.data = new[f"{path}.{name}.weight"]
        for calls in (call for batches in mine.values() for call in batches):
            _hand_on(merged, blocks, index, calls, _run(block, calls[path]))
        for name, module in linear.items():
            module.weight.data = kept[name]
    return new


def _calls(model: Any, blocks: list[str], batch: Batch) -> dict[str, Call]:
    calls: dict[str, Call] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: calls.update({path: (args, dict(kwargs))})

    hooks = [model.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True) for path in blocks]
    model(**batch.inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@contextmanager
def _inputs(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, args: seen.update({name: args[0]})

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def _run(block: nn.Module, call: Call) -> Tensor:
    args, kwargs = call
    out: Tensor = block(*args, **kwargs)[0]
    return out


def _hand_on(merged: Any, blocks: list[str], index: int, calls: dict[str, Call], out: Tensor) -> None:
    """Put what left a block in the place of what the blocks behind it were called with."""
    half = len(blocks) // 2
    if index + 1 == half:
        encoded = merged.encoder.final_layer_norm(out)
        # Of what a decoder block is called with, the fourth is what the encoder gave.
        for path in blocks[half:]:
            args, kwargs = calls[path]
            calls[path] = (*args[:3], encoded, *args[4:]), kwargs
    elif index + 1 < len(blocks):
        args, kwargs = calls[blocks[index + 1]]
        calls[blocks[index + 1]] = (out, *args[1:]), kwargs


def _largest_gap(pool: ModelPool, layers: list[CalibratedLayer], wanted: Mapping[str, Tensor]) -> float:
    ours = {
        slot.key: layer.updates[name]
        for layer in layers
        for name, slot in pool.chain.layers[layer.layer - 1].parameters.items()
        if name in layer.updates
    }
    if ours.keys() != wanted.keys():
        raise RuntimeError(f"solved for by one way only: {sorted(ours.keys() ^ wanted.keys())[:4]}")
    return max(float((ours[key] - weight).norm() / weight.norm()) for key, weight in wanted.items())
