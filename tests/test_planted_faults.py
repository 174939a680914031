"""One-line mutations of the product, each of which a check of this suite must reject.

A check is first run on the product as it is, where it must pass, and then on the mutated one, where it must fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from driftlens.calibration import featcal
from driftlens.calibration.featcal import FeatCal
from driftlens.diagnostics import attribution, drift_columns
from driftlens.engine import calibrating, pool as pool_module, walk
from driftlens.engine.pool import ModelPool
from driftlens.linalg import gram, state
from driftlens.merging.method import merge_methods
from driftlens.models import chain as chains, heads, readouts as embeddings
from driftlens.models.architectures import clip
from driftlens.models.chain import adapters
from driftlens.models.tracing import block_runner
from tests.calibration import test_mixtures as mixed, test_reference as calibration
from tests.diagnostics.heads import head
from tests.identities import test_attribution as attributed, test_routing as routing, test_split as split
from tests.models import test_sentences as sentences
from tests.zoo.cases import CASES, family

Patch = pytest.MonkeyPatch
OPEN_CLIP = CASES["open_clip_vit"]


# --- checks -------------------------------------------------------------------------------------------------------


def agrees_with_the_library() -> None:
    split.test_drift_is_what_the_library_itself_gives(family(OPEN_CLIP, n=3))


def contributions_sum_to_the_drift() -> None:
    models = family(OPEN_CLIP, n=3, batch_size=3)
    attributed.test_contributions_sum_to_the_final_drift_within_the_remainder(models)


def prefixes_are_models_of_two_halves() -> None:
    attributed.test_each_prefix_is_what_a_model_of_two_halves_gives(family(OPEN_CLIP, n=3, batch_size=3))


def columns_agree_with_the_slow_reference() -> None:
    split.test_columns_agree_with_a_slow_reference("open_clip_vit", "several_samples")


def models_are_left_as_they_were() -> None:
    models = family(OPEN_CLIP, n=3)
    before = {name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in models.modules.items()}
    skeleton = models.modules["base"]
    with pool_module.stream_weights(
        skeleton,
        [layer.path for layer in models.chain.blocks],
        models.pool.source("merged").read,
        torch.device("cpu"),
    ):
        skeleton(models.batches[0].inputs)
    for name, module in models.modules.items():
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        assert all(torch.equal(value, before[name][key]) for key, value in module.state_dict().items())


def a_certified_decision_never_flips() -> None:
    generator = torch.Generator().manual_seed(0)
    expert = torch.randn(4000, 7, generator=generator, dtype=torch.float64)
    variant = expert + 0.3 * torch.randn(4000, 7, generator=generator, dtype=torch.float64)
    found = drift_columns.output_drift_columns(head(), expert, variant, None)
    assert found["certified"].any()
    assert not (found["certified"] & found["flipped"]).any()
    assert (found["score_drift_l2"] <= found["score_bound"] * (1 + 1e-9)).all()


def task_arithmetic_of_one_expert_is_the_expert() -> None:
    base, expert = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -1.0])}
    merged = merge_methods["task_arithmetic"].function(base, {"a": expert, "b": base}, scaling=1.0)
    torch.testing.assert_close(merged["w"], expert["w"])


def labels_meet_rows_by_name() -> None:
    assert drift_columns.class_indices(head(classes=3), ["c2", "c0"]).tolist() == [2, 0]


def alignment_of_parts_adds_up() -> None:
    left, right = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = drift_columns.TaskVectorAlignment.between(left[:2], right[:2]) + drift_columns.TaskVectorAlignment.between(
        left[2:], right[2:]
    )
    assert parts.values()["cos"] == pytest.approx(float(F.cosine_similarity(left, right, dim=0)))


def calibration_agrees_with_the_slow_reference() -> None:
    calibration.test_every_architecture_agrees_with_the_slow_reference("hf_clip_vit", torch.device("cpu"))


def weighted_calibration_agrees_with_the_slow_reference() -> None:
    calibration.test_the_authors_token_weights_agree_with_the_slow_reference(torch.device("cpu"))


def embeddings_are_those_of_unpadded_texts() -> None:
    stated = {"pooling_mode": ["mean", "max", "lasttoken"]}
    with tempfile.TemporaryDirectory() as folder:
        sentences.test_the_final_feature_is_the_embedding_however_its_batch_is_padded(stated, Path(folder))


def mixtures_agree_with_the_library() -> None:
    routing.test_drift_of_mixtures_is_what_the_library_gives_and_parts_sum_to_it("Mixtral")


def what_changed_routes_do_is_exact() -> None:
    routing.test_routes_are_the_librarys_own_and_what_they_change_is_exact()


def experts_agree_with_sums_over_their_tokens() -> None:
    mixed.test_every_expert_agrees_with_sums_over_the_tokens_it_is_sent("Mixtral")


# --- faults -------------------------------------------------------------------------------------------------------

Fault = Callable[[Patch], None]
Check = Callable[[], None]


def put(owner: Any, attribute: str, fault: Callable[[Any], Any]) -> Fault:
    """What `fault` makes of an attribute, in its place."""
    return lambda patch: patch.setattr(owner, attribute, fault(getattr(owner, attribute)))


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.mT if weight.shape[0] == weight.shape[1] else weight


def transposed_weights(call: Any) -> Any:
    def transposing(module, parameters, *rest):  # type: ignore[no-untyped-def]
        given = {name: transposed(x) if x.dim() == 2 else x for name, x in parameters.items()}
        return call(module, given, *rest)

    return transposing


def forgotten_biases(call: Any) -> Any:
    def forgetting(module, parameters, *rest):  # type: ignore[no-untyped-def]
        biases = {name: 0 * x for name, x in parameters.items() if name.endswith("_proj.bias")}
        return call(module, {**parameters, **biases}, *rest)

    return forgetting


def layer_off_by_one(patch: Patch) -> None:
    """Every block but the last runs with its successor's weights."""
    chain_of = type(adapters["open_clip_vit"]).chain

    def shifted(self, module):  # type: ignore[no-untyped-def]
        chain = chain_of(self, module)
        stem, *blocks, last = chain.layers
        following = [*blocks[1:], blocks[-1]]
        moved = [
            dataclasses.replace(block, parameters=later.parameters)
            for block, later in zip(blocks, following, strict=True)
        ]
        return dataclasses.replace(chain, layers=(stem, *moved, last))

    patch.setattr(CASES["open_clip_vit"].chain.__self__.__class__, "chain", shifted)
    patch.setitem(CASES, "open_clip_vit", dataclasses.replace(OPEN_CLIP, chain=adapters["open_clip_vit"].chain))
    patch.setitem(globals(), "OPEN_CLIP", CASES["open_clip_vit"])


def swapped_keys_and_values(original: Any) -> Any:
    def swapped(self, *given, **options):  # type: ignore[no-untyped-def]
        keys, values = self.k_proj, self.v_proj
        self.k_proj, self.v_proj = values, keys
        try:
            return original(self, *given, **options)
        finally:
            self.k_proj, self.v_proj = keys, values

    return swapped


def crossed_output_is(name: str) -> Callable[[Any], Any]:
    return lambda decompose: lambda view: decompose(dataclasses.replace(view, crossed_out=getattr(view, name)))


def mismatch_and_propagation_swapped(original: Any) -> Any:
    def swapped(view):  # type: ignore[no-untyped-def]
        parts = original(view)
        return walk.DriftSplit(parts.drift, parts.propagation, parts.local_mismatch)

    return swapped


def prefix_off_by_one(original: Any) -> Any:
    def late(self, view):  # type: ignore[no-untyped-def]
        original(self, view)
        if view.layer.index > 1:
            self.batch.put(self.prefix_key(view.layer.index - 1), view.merged_out)

    return late


def hook_left_behind(_: Any) -> Any:
    def careless(block, path, read, stack):  # type: ignore[no-untyped-def]
        block.register_forward_hook(lambda *_: None)

    return careless


def weights_not_put_back(_: Any) -> Any:
    @contextmanager
    def careless(module, names, read):  # type: ignore[no-untyped-def]
        for name in names:
            owner, _, leaf = name.rpartition(".")
            weight = torch.nn.Parameter(read(name) + 1, requires_grad=False)
            module.get_submodule(owner)._parameters[leaf] = weight
        yield

    return careless


def mean_of_task_vectors_for_their_sum(patch: Patch) -> None:
    method = merge_methods["task_arithmetic"]

    def averaged(base, experts, *, scaling=0.3):  # type: ignore[no-untyped-def]
        return method.function(base, experts, scaling=scaling / len(experts))

    patch.setitem(merge_methods._entries, "task_arithmetic", dataclasses.replace(method, function=averaged))


def expert_of_the_next_layer(original: Any) -> Any:
    def shifted(self, model, layer, *names):  # type: ignore[no-untyped-def]
        is_moved = model.startswith("expert:") and layer in self.chain.blocks[:-1]
        return original(self, model, self.chain.layers[layer.index] if is_moved else layer, *names)

    return shifted


def stale_features(original: Any) -> Any:
    return lambda self, layer, merged, updates: original(self, layer, merged, {})


def expert_path_replaced(original: Any) -> Any:
    def mixed(self, *given):  # type: ignore[no-untyped-def]
        drift = original(self, *given)
        for batch in itertools.chain.from_iterable(self.stream.cached.values()):
            batch.put("expert", batch.get("merged"))
        return drift

    return mixed


def bias_of_the_merged_weight(patch: Patch) -> None:
    solve, original = featcal._solve_linear_sites, featcal.solve_bias
    outputs = []

    def noted(problem, *rest, **more):  # type: ignore[no-untyped-def]
        moments, biased = (
            problem.moments,
            [site.name for site in problem.sites if site.name in problem.expert_bias],
        )
        outputs[:] = [problem.merged[f"{name}.weight"].to(moments.gram) @ moments.mean_in for name in biased]
        return solve(problem, *rest, **more)

    def late(target, output, *rest, **more):  # type: ignore[no-untyped-def]
        return original(target, outputs.pop(0), *rest, **more)

    patch.setattr(featcal, "_solve_linear_sites", noted)
    patch.setattr(featcal, "solve_bias", late)


def token_weights_for_keys_too(original: Any) -> Any:
    return lambda self, site, *, in_last_block: original(
        self, dataclasses.replace(site, mixes_tokens=False), in_last_block=in_last_block
    )


def without_gates(weights: Any) -> Any:
    return lambda chain, layer, site, x, *rest: (
        weights(chain, layer, site, x, *rest) if site.expert is None else torch.ones(len(x), dtype=x.dtype)
    )


VIT, STATE, ATTRIBUTION = partial(put, clip), partial(put, state), partial(put, attribution)
WALK, SUMS, POOL = partial(put, walk), partial(put, calibrating), partial(put, pool_module)
FEATCAL, ADVANCE = partial(put, FeatCal), partial(put, calibrating.LayerwiseLoop, "_advance_merged_features")
PLANTED: dict[Check, dict[str, Fault]] = {
    agrees_with_the_library: {
        "transposed_weight": VIT("call_with_weights", transposed_weights),
        "forgotten_bias": VIT("call_with_weights", forgotten_biases),
        "layer_off_by_one": layer_off_by_one,
        "swapped_keys_and_values": put(clip._UnpackedAttention, "forward", swapped_keys_and_values),
    },
    contributions_sum_to_the_drift: {
        "crossed_output_of_the_wrong_model": ATTRIBUTION("differentiable_split", crossed_output_is("expert_out")),
        "quadrature_on_the_wrong_interval": STATE(
            "gauss_legendre", lambda nodes_of: lambda nodes: [(2 * t - 1, w) for t, w in nodes_of(nodes)]
        ),
        "one_point_for_all_nodes": STATE(
            "stack_states", lambda stacked: lambda points: stacked(points[:1] * len(points))
        ),
        "mean_left_in_the_norms_derivative": put(
            state,
            "_layer_norm_projection",
            lambda _: lambda vector, z: vector - z * (z * vector).mean(dim=-1, keepdim=True),
        ),
        # The path ends at the expert's input: no drift to average over.
        "mismatch_not_carried_on": ATTRIBUTION(
            "PathJacobian",
            lambda operator: lambda call, start, end, nodes: operator(call, start, start, nodes),
        ),
    },
    mixtures_agree_with_the_library: {
        "experts_swapped": put(
            block_runner, "fused_tensor", lambda joined: lambda slots, parts: joined(slots[::-1], parts[::-1])
        ),
    },
    what_changed_routes_do_is_exact: {
        "changed_routes_left_out": put(
            walk.LayerView,
            "rerouting_change",
            lambda _: lambda self, by: {n: 0 * x for n, x in self.merged_out.items()},
        ),
    },
    experts_agree_with_sums_over_their_tokens: {
        "gates_ignored": SUMS("row_weights", without_gates),
    },
    columns_agree_with_the_slow_reference: {
        "crossed_output_on_the_wrong_input": WALK("decompose", crossed_output_is("merged_out")),
        "mismatch_and_propagation_swapped": WALK("decompose", mismatch_and_propagation_swapped),
        "mean_for_sum_in_a_norm": WALK(
            "state_norms", lambda _: lambda s: next(iter(s.values())).flatten(1).square().mean(dim=1).sqrt()
        ),
        "last_token_for_the_class_token": put(
            chains,
            "pool_features",
            lambda pooled: lambda hidden, how, mask=None: pooled(hidden, "last", mask),
        ),
    },
    prefixes_are_models_of_two_halves: {"prefix_off_by_one": put(attribution.PrefixSwaps, "add", prefix_off_by_one)},
    models_are_left_as_they_were: {
        "hook_left_behind": POOL("_register_streaming_hooks", hook_left_behind),
        "weights_not_put_back": POOL("_temporary_weights", weights_not_put_back),
    },
    a_certified_decision_never_flips: {
        "certificate_without_the_half": put(
            drift_columns, "_decision_margin", lambda margin: lambda scores: 4 * margin(scores)
        ),
        "bound_from_the_longest_feature": put(
            heads.Head,
            "gain_bound",
            lambda bound: (
                lambda self, start, end: bound(self, start, end) / (3 * end.norm(dim=1) + 3 * start.norm(dim=1))
            ),
        ),
    },
    task_arithmetic_of_one_expert_is_the_expert: {
        "mean_of_task_vectors_for_their_sum": mean_of_task_vectors_for_their_sum
    },
    embeddings_are_those_of_unpadded_texts: {
        "pooling_mask_ignored": put(
            embeddings,
            "_pooled_tokens",
            lambda pooled: lambda tokens, mask, modes: pooled(tokens, torch.ones_like(mask), modes),
        ),
        "pools_in_the_library_s_order": put(
            embeddings,
            "_pooled_tokens",
            lambda pooled: lambda tokens, mask, modes: pooled(tokens, mask, tuple(sorted(modes))),
        ),
        "maps_left_out": put(
            embeddings, "_apply_dense_layer", lambda _: lambda weights, activation, is_residual, x: x
        ),
    },
    labels_meet_rows_by_name: {
        "labels_by_position": put(
            drift_columns, "class_indices", lambda _: lambda head, labels: torch.arange(len(labels))
        )
    },
    alignment_of_parts_adds_up: {
        "energy_of_one_vector_for_both": put(
            drift_columns.TaskVectorAlignment,
            "between",
            lambda between: lambda variant, expert: between(variant, variant),
        )
    },
    calibration_agrees_with_the_slow_reference: {
        "transposed_expert_weight": SUMS(
            "stack_site_weights", lambda stacked: lambda *given: transposed(stacked(*given))
        ),
        "expert_of_the_next_layer": put(ModelPool, "parameters", expert_of_the_next_layer),
        "anchor_left_out": FEATCAL("anchor_parameters", lambda _: lambda self, merged, base: None),
        "anchor_without_the_base": FEATCAL(
            "anchor_parameters", lambda anchor: lambda self, merged, base: anchor(self, merged, merged)
        ),
        "mean_over_tasks_for_their_sum": FEATCAL(
            "task_weight", lambda weight: lambda self, norm: weight(self, norm) / 2
        ),
        "tasks_not_balanced": FEATCAL("task_weight", lambda _: lambda self, norm: torch.ones_like(norm)),
        "stale_features": ADVANCE(stale_features),
        "expert_path_replaced": ADVANCE(expert_path_replaced),
        "target_of_the_expert_alone": SUMS(
            "CrossMomentSum", lambda cross: lambda *given, **options: cross(*given, **options | {"alpha": 1.0})
        ),
        "expert_outputs_with_their_bias": SUMS(
            "stack_site_biases", lambda bias: lambda *given: torch.zeros_like(bias(*given))
        ),
        "norm_of_half_a_matrix": put(gram.GramSum, "norm", lambda norm: lambda self: norm(self) / 2),
        "bias_of_the_merged_weight": bias_of_the_merged_weight,
    },
    weighted_calibration_agrees_with_the_slow_reference: {
        "token_weights_counted_twice": SUMS(
            "row_weights",
            lambda weights: lambda *given: None if (w := weights(*given)) is None else w.square(),
        ),
        "token_weights_for_keys_too": FEATCAL("target_spec", token_weights_for_keys_too),
    },
}


QUICK = {"transposed_weight", "tasks_not_balanced", "forgotten_bias", "mismatch_and_propagation_swapped"}
"""Those that a newcomer's tests plant."""


@cache
def holds(check: Check) -> None:
    """Of what nobody spoiled; once for all faults that it has to find."""
    check()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        pytest.param(fault, check, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for check, faults in PLANTED.items()
        for name, fault in faults.items()
    ],
)
def test_planted_fault_is_rejected(fault: Fault, check: Check) -> None:
    holds(check)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check()
