"""Every declared law of every merge method; those that drop entries, and SLERP, against loops and limits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from driftlens.merging.method import merge_methods
from driftlens.utils.errors import NumericsError, SpecError
from tests.merging.applying import LAWS, Tensors, apply, assert_same, random_model, random_state, states
from tests.reference import merging as slow


@pytest.mark.parametrize(
    ("name", "law"), [(name, law) for name in merge_methods for law in sorted(merge_methods[name].laws)]
)
def test_declared_law_holds(name: str, law: str) -> None:
    found, wanted = LAWS[law](merge_methods[name])
    assert_same(found, wanted)


@pytest.mark.parametrize("name", merge_methods)
def test_names_shapes_and_dtypes_are_kept_and_inputs_untouched(name: str) -> None:
    given = states(merge_methods[name])
    base, experts = copy.deepcopy(given)
    merged = apply(merge_methods[name], base, experts)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in merged.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in given[0].items()
    }
    for key, tensor in given[0].items():
        assert torch.equal(base[key], tensor)
        assert all(torch.equal(experts[task][key], given[1][task][key]) for task in experts)


BASE = random_state(0)
EXPERTS = {task: random_state(seed) for seed, task in enumerate("abc", start=1)}
MODELS = {task: random_model(seed) for seed, task in enumerate("wabc")}
WHOLE = MODELS.pop("w")

NOTHING_DROPPED: dict[str, dict[str, object]] = {
    "ties": {"density": 1.0},
    "dare": {"drop_rate": 0.0},
}


def vectors(name: str) -> dict[str, torch.Tensor]:
    return {task: expert[name] - BASE[name] for task, expert in EXPERTS.items()}


@pytest.mark.parametrize("name", NOTHING_DROPPED)
def test_where_nothing_is_dropped_one_expert_at_scaling_one_stays(name: str) -> None:
    base, experts = states(merge_methods[name])
    merged = apply(merge_methods[name], base, {"a": experts["a"]}, scaling=1.0, **NOTHING_DROPPED[name])
    assert_same(merged, experts["a"])


def test_dare_that_drops_nothing_is_task_arithmetic() -> None:
    merged = apply(merge_methods["dare"], BASE, EXPERTS, scaling=0.4, drop_rate=0.0)
    assert_same(merged, apply(merge_methods["task_arithmetic"], BASE, EXPERTS, scaling=0.4))


@pytest.mark.parametrize("merge_func", ["mean", "sum", "max"])
@pytest.mark.parametrize("trim_scope", ["global", "per_tensor"])
def test_ties_is_what_a_loop_over_all_sorted_entries_makes(merge_func: str, trim_scope: str) -> None:
    settings = {"scaling": 0.5, "density": 0.3, "merge_func": merge_func, "trim_scope": trim_scope}
    merged = apply(merge_methods["ties"], WHOLE, MODELS, **settings)
    flat = {
        name: {task: (expert[name] - WHOLE[name]).flatten().numpy() for task, expert in MODELS.items()}
        for name in WHOLE
    }
    joined = {task: np.concatenate([flat[name][task] for name in WHOLE]) for task in MODELS}
    steps = {name: slow.ties_step(flat[name], 0.3, merge_func) for name in WHOLE}
    if trim_scope == "global":
        whole = slow.ties_step(joined, 0.3, merge_func)
        ends = np.cumsum([WHOLE[name].numel() for name in WHOLE])[:-1]
        steps = dict(zip(WHOLE, np.split(whole, ends), strict=True))
    for name, start in WHOLE.items():
        step = torch.from_numpy(steps[name]).float().view_as(start)
        torch.testing.assert_close(merged[name], start + 0.5 * step, rtol=1e-6, atol=1e-7)
        assert torch.equal(merged[name] != start, step.ne(0) & (start + 0.5 * step != start))


def test_a_tensor_that_a_file_holds_twice_counts_once_in_a_global_trim() -> None:
    twice = {"copy": "blocks.0.up.weight"}

    def tied(state: Tensors) -> Tensors:
        return {**state, **{copy: state[name] for copy, name in twice.items()}}

    ties = merge_methods["ties"].function
    once = dict(ties(WHOLE, MODELS))
    merged = dict(ties(tied(WHOLE), {task: tied(expert) for task, expert in MODELS.items()}))
    assert_same(merged, tied(once))
    assert any(not torch.equal(once[name], WHOLE[name]) for name in once)


def test_an_exact_tie_of_signs_elects_neither() -> None:
    base, experts = (
        {"w": torch.zeros(2)},
        {"a": {"w": torch.tensor([1.0, 2])}, "b": {"w": torch.tensor([-1.0, 1])}},
    )
    assert dict(merge_methods["ties"].function(base, experts, density=1.0))["w"].tolist() == [0.0, 1.5]


@pytest.mark.parametrize("trim_scope", ["global", "per_tensor"])
def test_ties_with_a_drop_rate_is_ties_of_what_dare_leaves(trim_scope: str) -> None:
    at = {"trim_scope": trim_scope, "density": 0.3, "scaling": 0.5}
    sparse = {
        task: dict(merge_methods["dare"].function(WHOLE, {task: expert}, scaling=1.0, drop_rate=0.4, seed=3))
        for task, expert in MODELS.items()
    }
    merged = dict(merge_methods["ties"].function(WHOLE, MODELS, drop_rate=0.4, seed=3, merge_func="sum", **at))
    wanted = dict(merge_methods["ties"].function(WHOLE, sparse, merge_func="sum", **at))
    assert_same(merged, wanted)


def test_masks_follow_seed_task_and_name_and_nothing_else() -> None:
    dare = merge_methods["dare"].function
    base, expert = (
        {"v": torch.zeros(500), "w": torch.zeros(500)},
        {"v": torch.ones(500), "w": torch.ones(500)},
    )

    def kept(seed: int, task: str, name: str, other: str = "x") -> list[bool]:
        merged = dare({name: base[name]}, {task: expert, other: base}, scaling=1.0, seed=seed)
        return (merged[name] != 0).tolist()

    assert kept(0, "a", "w") == kept(0, "a", "w", "earlier")
    assert len({tuple(kept(*given)) for given in ((0, "a", "w"), (1, "a", "w"), (0, "b", "w"), (0, "a", "v"))}) == 4
    assert dare(base, {"a": expert}, scaling=1.0)["w"].unique().tolist() == [0.0, 2.0]


def test_slerp_is_shoemakes_formula() -> None:
    two = {task: EXPERTS[task] for task in "ab"}
    slerp = merge_methods["slerp"].function
    for name in BASE:
        first, second = (two[task][name].flatten().numpy() for task in "ab")
        for t in (0.0, 0.3, 1.0):
            wanted = torch.from_numpy(slow.slerp(first, second, t)).view_as(BASE[name])
            torch.testing.assert_close(slerp(BASE, two, t=t)[name], wanted)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_tensors_without_a_direction_are_merged_all_the_same(first: float) -> None:
    base = {"w": torch.zeros(3)}
    experts = {"a": {"w": torch.full((3,), first)}, "b": {"w": torch.zeros(3)}}
    for name in ("slerp", "model_stock"):
        merged = merge_methods[name].function(base, experts)["w"]
        assert merged.isfinite().all()
        if not first:
            assert torch.equal(merged, base["w"])


def test_model_stock_is_the_formula_of_the_mean_cosine() -> None:
    stock = merge_methods["model_stock"].function
    for name, start in BASE.items():
        given = vectors(name)
        ratio = slow.stock_ratio({task: vector.flatten().numpy() for task, vector in given.items()})
        mean = sum(given.values()) / 3
        torch.testing.assert_close(stock(BASE, EXPERTS)[name], start + ratio * mean)
        rows = {task: vector.reshape(-1, vector.shape[-1]) for task, vector in given.items()}
        ratios = [slow.stock_ratio({t: row[at].numpy() for t, row in rows.items()}) for at in range(len(rows["a"]))]
        wanted = start + (torch.tensor(ratios).double()[:, None] * mean.view(len(ratios), -1)).view_as(start)
        torch.testing.assert_close(stock(BASE, EXPERTS, filter_wise=True)[name], wanted)
    # Right angles say that experts agree on nothing.
    base = {"w": torch.zeros(2)}
    crossed = {"a": {"w": torch.tensor([2.0, 0])}, "b": {"w": torch.tensor([0.0, 3])}}
    assert torch.equal(stock(base, crossed)["w"], base["w"])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ties", {"density": 0}, "density is 0; expected a finite number more than 0 and at most 1"),
        ("ties", {"merge_func": "means"}, "one of mean, sum, max"),
        ("dare", {"drop_rate": 1.0}, "at most 0.999"),
        ("ties", {"density": 1.5}, "density is 1.5"),
        ("slerp", {"t": 2}, "at most 1"),
        ("wudi", {"learning_rate": -1}, "learning_rate is -1; expected a finite number at least 0"),
        ("wudi", {"steps": 10**12}, "at least 0 and at most"),
        ("adamerging", {"steps": 10**12}, "at least 0 and at most"),
        ("fisher", {"epsilon": 1}, "no parameter 'epsilon'"),
        ("ties", {"densty": 1}, "no parameter 'densty'"),
        ("task_arithmetic", {"scaling": "big"}, "finite number"),
        ("task_arithmetic", {"scaling": float("nan")}, "finite"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        merge_methods[name].with_settings(settings)


def test_what_can_not_be_merged_is_refused() -> None:
    with pytest.raises(SpecError, match="needs exactly 2 experts, found 3"):
        apply(merge_methods["slerp"], BASE, EXPERTS)
    broken = {**MODELS, "b": {**MODELS["b"], "norm.weight": MODELS["b"]["norm.weight"] * torch.nan}}
    with pytest.raises(NumericsError, match=r"^b: tensor 'norm\.weight'"):
        apply(merge_methods["ties"], WHOLE, broken)
    half = {task: {name: value.half() for name, value in expert.items()} for task, expert in MODELS.items()}
    wider = {task: {name: value.float() for name, value in expert.items()} for task, expert in half.items()}
    assert_same(apply(merge_methods["ties"], WHOLE, half), apply(merge_methods["ties"], WHOLE, wider))
