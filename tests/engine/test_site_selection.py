"""Which sites are calibrated by default, by pattern and by kind; and how a wrong pattern is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from driftlens.engine.sites import select_sites, site_path, site_roles
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import adapters
from driftlens.utils.errors import LayerNotFoundError
from tests.refusing import refusing
from tests.zoo.cases import with_seed
from tests.zoo.decoders import CONFIGS
from tests.zoo.small import TINY, flan_t5


@pytest.fixture(scope="module")
def chain():  # type: ignore[no-untyped-def]
    return adapters["open_clip_vit"].chain(TINY["open_clip_vit"]())


LINEAR = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")


def test_by_default_all_linear_and_norm_modules_inside_blocks(chain) -> None:  # type: ignore[no-untyped-def]
    found = select_sites(chain)
    assert list(found) == [2, 3, 4]
    assert {frozenset(names) for names in found.values()} == {frozenset({*LINEAR, "ln_1", "ln_2"})}


@pytest.mark.parametrize(
    ("update", "names"),
    [(("linear",), LINEAR), (("bias",), LINEAR), (("norm",), ("ln_1", "ln_2"))],
    ids=["linear", "bias", "norm"],
)
def test_sites_of_which_nothing_would_change_are_left_out(chain, update, names) -> None:  # type: ignore[no-untyped-def]
    assert set(select_sites(chain, update=update)[2]) == set(names)


def test_patterns_name_sites_stem_and_head_included(chain) -> None:  # type: ignore[no-untyped-def]
    assert select_sites(chain, sites=["*.mlp.*"], layers=[3]) == {3: ("mlp.c_fc", "mlp.c_proj")}
    assert select_sites(chain, sites=["ln_p*", "proj"]) == {1: ("ln_pre",), 5: ("ln_post", "proj")}
    assert select_sites(chain, layers="transformer.resblocks.1").keys() == {3}


def test_the_parts_of_a_fused_attention_have_public_names(chain) -> None:  # type: ignore[no-untyped-def]
    block, head = chain.layers[1], chain.layers[-1]
    assert [site_path(block, site) for site in block.sites][1:3] == [
        "transformer.resblocks.0.attn.q_proj",
        "transformer.resblocks.0.attn.k_proj",
    ]
    assert [site_path(head, site) for site in head.sites] == ["ln_post", "proj"]


def test_an_unknown_pattern_is_refused_with_the_three_nearest(chain) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayerNotFoundError, match=r"no site matches '\*.mlpp.c_fc'") as caught:
        select_sites(chain, sites=["*.mlp.*", "*.mlpp.c_fc"])
    assert len(caught.value.context["nearest"]) == 3
    with refusing(LayerNotFoundError, match="no site matches 'gate'", hint="q, k, v, o, up, down"):
        select_sites(chain, sites=["q", "gate"])  # a group of other models
    with pytest.raises(LayerNotFoundError, match=r"no layer matches.*resblocks\.1"):
        select_sites(chain, layers="resblock.*")
    for asked, told in (
        ({"sites": ["proj"], "update": ("norm",)}, "sites proj and update norm"),
        (
            {"sites": ["proj"], "layers": [2, "final"], "update": ("norm",)},
            "layers 2 final, sites proj and update norm",
        ),
        ({"layers": 1}, "layers 1 and update linear bias norm"),
    ):
        with pytest.raises(LayerNotFoundError) as caught:
            select_sites(chain, **asked)
        assert caught.value.message.endswith(f" matches {told}") and "share" not in caught.value.hint


_ATTENTION, _GATED = {"q", "k", "v", "o"}, {"gate", "up", "down"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama", _ATTENTION | _GATED | {"norms"}),
        ("Gemma 3", _ATTENTION | _GATED | {"norms"}),
        ("Phi-3", {"qkv", "o", "up", "down", "norms"}),
    ],
)
def test_parts_of_a_block_are_known_whatever_the_library_calls_them(name: str, expected: set[str]) -> None:
    model = with_seed(lambda: transformers.AutoModelForCausalLM.from_config(CONFIGS[name]))().eval()
    ids = {"input_ids": torch.arange(10).reshape(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    for layer in chain_of_module(model, ids).blocks:
        assert set(site_roles(layer).values()) == expected
        assert {site.name for site in layer.sites} == set(site_roles(layer))


def test_each_attention_of_a_decoder_block_has_its_own_parts() -> None:
    chain = adapters["seq2seq"].chain(flan_t5())
    groups = site_roles(chain.blocks[-1])
    for name, group in groups.items():
        leaf = name.rpartition(".")[2]
        assert group == {"wi_0": "gate", "wi_1": "up", "wo": "down", "layer_norm": "norms"}.get(leaf, leaf)
    assert sorted(groups.values()).count("q") == sorted(groups.values()).count("o") == 2
    chosen = select_sites(chain, sites=["q", "*.wo"], update=("linear",))
    assert chosen[2] == ("layer.0.SelfAttention.q", "layer.1.DenseReluDense.wo")
