"""From ranges to tables: wide enough for every layer, as few programs as asked for, and what the dealer sends is foretold."""

from dataclasses import replace
from itertools import combinations
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64

from spu_llm.bench.layer import LayerShape, random_params
from spu_llm.dealer.dpf import Correction
from spu_llm.dealer.material import Looked
from spu_llm.errors import UserError
from spu_llm.models.cache import cache_shape, window
from spu_llm.models.calibration import Calibration, LayerRanges
from spu_llm.models.fixed_block import BITS, STREAM_BITS, block, encode_angles, encode_layer, with_reference
from spu_llm.models.folded import fold_layer
from spu_llm.models.plan import dealer_bytes, looked_up, plan_model
from spu_llm.primitives.attention import Place, RowCache
from spu_llm.primitives.dealing import with_material
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.norm import rounded_phi

CONFIGS = {
    "gpt2": LayerShape("gpt2", 64, 4, 4, 80, 31).config(),
    "opt": LayerShape("opt", 64, 4, 4, 80, 31).config(),
    "llama": LayerShape("llama", 48, 4, 2, 80, 31).config(),
    "mixtral": LayerShape("mixtral", 48, 4, 2, 20, 31, experts=4, experts_per_token=2).config(),
}
QUIET = LayerRanges((0.5, 2.0), (0.5, 2.0), (-10.0, 3.0), (-1.0, 1.0), (-3.0, 3.0), (-1.0, 1.0))
"""What the smallest tables serve."""


def calibration(*layers, final=(0.5, 2.0)):
    return Calibration(layers, (), final, 1)


def around(middle, ratio):
    return middle / ratio**0.5, middle * ratio**0.5


@st.composite
def ranges(draw, family):
    """Of one layer, up to what the widest tables take."""
    squares = [around(2.0 ** draw(st.integers(-6, 6)), draw(st.sampled_from([1, 5, 7.9, 8.1, 100, 500]))) for _ in range(2)]
    low, high = (48, 48) if family == "gpt2" else (79, 50)
    return LayerRanges(
        *squares,
        (draw(st.sampled_from([-1.0, -39.1, -39.3, -90.0, -91.0, -180.7])), 5.0),
        (draw(st.sampled_from([-5.0, -3.51, -3.49, 0.0])), draw(st.sampled_from([0.5, 2.1, 2.2, 4.9, 5.0, 11.0]))),
        (-draw(st.floats(0.1, low)), draw(st.floats(0.1, high))),
        (-draw(st.floats(0.1, 4.0)), draw(st.floats(0.1, 4.0))),
    )


def off(table, function, x):
    """By how much of the function's value the table misses it, at places of one sign and far from 0."""
    x = np.asarray(x)
    return np.abs(table.evaluate(x) / function(x) - 1).max()


def check_norm(config, norm, phi, squares):
    """Twice what was seen, either way, under the phi that the ring holds."""
    held = rounded_phi(phi, norm.weight_bits(STREAM_BITS))
    sums = config.width * held**2 * np.geomspace(squares[0] / 1.9, squares[1] * 1.9, 50)
    assert sums[-1] < norm.root.high
    assert off(norm.root, lambda s: (s / config.width) ** -0.5, sums) < 2e-2


def check_softmax(plan, layer):
    assert plan.exp.low < 1.25 * layer.relative[0] and plan.exp.high >= 14
    x = np.linspace(max(plan.exp.low, -3.0), 6.0, 50)
    assert off(plan.exp, np.exp, x) < 1e-2
    sums = np.geomspace(np.exp(layer.log_sum[0]), np.exp(layer.log_sum[1] + 1.9), 99)  # other text has larger ones
    if plan.refinement is not None:
        assert plan.refinement.exp.low < 1.25 * layer.relative[0] / 2
        sums = np.geomspace(1 / 1024, 1.0, 99)
    assert plan.power.high > sums.max()
    for borrow in (0, 1):  # a borrow looks the next segment's power up
        edge = np.floor(sums / plan.power.width) * plan.power.width
        near_one = sums * plan.power.evaluate(edge + borrow * plan.power.width)
        assert near_one.max() < plan.inverse.high
        assert off(plan.inverse, lambda s: 1 / s, near_one) < 1e-2


def check_activation(config, table, seen):
    if config.family == "opt":
        assert table is None
        return
    assert table.low < 1.3 * seen[0] and table.high > 1.3 * seen[1]
    x = np.linspace(1.3 * seen[0], 1.3 * seen[1], 99)
    assert np.abs(table.evaluate(x) - table.function(x)).max() < 2e-3


def check_routing(config, plan, routers):
    if config.experts is None:
        assert plan is None
        return
    low, high = min(low for low, _ in routers), max(high for _, high in routers)
    assert plan.softmax.exp.low < low - plan.shift and high - plan.shift < plan.softmax.exp.high
    largest, least = config.experts_per_token * np.exp(high - plan.shift), np.exp(-plan.shift)
    table = plan.softmax.power or plan.softmax.inverse
    assert largest < table.high
    if plan.softmax.power is None:
        assert off(table, lambda s: 1 / s, np.geomspace(1.3 * least, largest, 99)) < 1e-2


@pytest.mark.parametrize("family", CONFIGS)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), programs=st.integers(1, 4), count=st.integers(1, 7))
def test_every_layer_is_served(family, data, programs, count):
    config = CONFIGS[family]
    layers = [data.draw(ranges(family)) for _ in range(count)]
    plan = plan_model(config, calibration(*layers, final=layers[0].ffn_squares), programs)
    assert len(plan.blocks) == len(plan.phis) == len(plan.sizes) == count
    assert len({id(block) for block in plan.blocks}) == len(set(plan.sizes)) <= programs
    for block_plan, phis, layer in zip(plan.blocks, plan.phis, layers, strict=True):
        check_norm(config, block_plan.norm, phis[0], layer.attention_squares)
        check_norm(config, block_plan.norm, phis[1], layer.ffn_squares)
        check_softmax(block_plan.softmax, layer)
        check_activation(config, block_plan.activation, layer.activation)
        check_routing(config, block_plan.routing, [layer.router for layer in layers])
    check_norm(config, plan.final, plan.final_phi, layers[0].ffn_squares)


def test_equal_layers_share_one_plan():
    """Not the ranges but the tables count: programs are compiled for the plans, told apart by identity."""
    wide = replace(QUIET, relative=(-100.0, 3.0))
    layers = [QUIET, wide, replace(QUIET, relative=(-9.0, 1.0), attention_squares=(70.0, 100.0)), wide]
    plan = plan_model(CONFIGS["gpt2"], calibration(*layers))
    assert plan.blocks[0] is plan.blocks[2] and plan.blocks[1] is plan.blocks[3]
    assert plan.blocks[0] is not plan.blocks[1]
    assert plan.phis[0] == (1.0, 1.0) and plan.phis[2][0] == pytest.approx(7000**-0.25)


STEPS = {
    "norm": ("attention_squares", [(1.0, top) for top in (7.9, 8.1, 31.0, 33.0, 127.0, 129.0)], [0, 1, 1, 2, 2, 3]),
    "ffn norm": ("ffn_squares", [(1.0, 7.9), (1.0, 8.1), (1.0, 500.0)], [0, 1, 3]),
    "exp": ("relative", [(low, 0.0) for low in (-39.1, -39.3, -90.3, -90.5, -180.7)], [0, 1, 1, 2, 2]),
    "sums": ("log_sum", [(-3.4, 2.1), (-1.0, 2.2), (-1.0, 4.9), (-1.0, 5.0), (-3.6, 1.0)], [0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_size_larger_than_needed(name):
    """At both sides of each step, with one function's range alone."""
    field, seen, sizes = STEPS[name]
    layers = [replace(QUIET, **{field: value}) for value in seen]
    plan = plan_model(CONFIGS["gpt2"], calibration(*layers), programs=9)
    part = {"ffn norm": "norm"}.get(name, name)
    assert [getattr(size, part) for size in plan.sizes] == sizes
    others = {"norm", "exp", "sums", "activation"} - {part}
    assert all(getattr(size, other) == 0 for size in plan.sizes for other in others)
    assert [block_plan.softmax.refinement is not None for block_plan in plan.blocks] == [size.sums == 2 for size in plan.sizes]


@pytest.mark.parametrize(
    ("family", "seen", "sizes"),
    [
        ("gpt2", [(-6.1, 5.9), (-6.2, 1.0), (-1.0, 6.0), (-12.4, 1.0), (-49.0, 48.9)], [0, 1, 1, 2, 2]),
        ("llama", [(-15.3, 16.9), (-15.5, 1.0), (-1.0, 17.2), (-39.9, 1.0), (-1.0, 50.0)], [0, 1, 1, 1, 2]),
        ("opt", [(-1e6, 1e6)], [0]),
    ],
)
def test_no_activation_larger_than_needed(family, seen, sizes):
    layers = [replace(QUIET, activation=value) for value in seen]
    assert [size.activation for size in plan_model(CONFIGS[family], calibration(*layers), 9).sizes] == sizes


def words(config, plan):
    """Ring words of tables that the layers' tokens take, at 64 cached positions."""
    return sum(count * table.words for block_plan in plan.blocks for count, table in looked_up(config, block_plan, 64))


def covering(a, b):
    """Ranges about the same middle that hold both."""
    return LayerRanges(*((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_cheapest_pair_is_merged(family, data):
    """One program too many: no other pair of layers' ranges joined gives fewer words of material in all."""
    config = CONFIGS[family]
    kinds = st.builds(
        LayerRanges, st.just((1.0, 1.0)), st.sampled_from([around(1.0, r) for r in (1, 20, 100, 500)]),
        st.sampled_from([(-10.0, 3.0), (-60.0, 3.0), (-150.0, 3.0)]), st.sampled_from([(-1.0, 1.0), (-1.0, 4.0), (-1.0, 9.0)]),
        st.sampled_from([(-3.0, 3.0), (-10.0, 10.0) if family == "gpt2" else (-30.0, 20.0), (-48.0, 48.0)]),
    )  # fmt: skip
    several = data.draw(st.lists(kinds, min_size=3, max_size=5, unique=True))
    layers = [kind for kind in several for _ in range(data.draw(st.integers(1, 4)))]
    apart = plan_model(config, calibration(*layers), len(layers))
    assert len(set(apart.sizes)) == len(several)
    merged = plan_model(config, calibration(*layers), len(several) - 1)
    assert len(set(merged.sizes)) < len(several)  # a joined pair may be what a third layer has
    ways = []
    for a, b in combinations(several, 2):
        joined = [covering(a, b) if layer in (a, b) else layer for layer in layers]
        ways.append(words(config, plan_model(config, calibration(*joined), len(layers))))
    assert words(config, apart) < words(config, merged) == min(ways)


def test_one_program_has_the_largest_of_everything():
    layers = [replace(QUIET, relative=(-150.0, 0.0)), replace(QUIET, ffn_squares=(1.0, 500.0)), replace(QUIET, log_sum=(-1.0, 5.0))]
    plan = plan_model(CONFIGS["gpt2"], calibration(*layers), programs=1)
    apart = plan_model(CONFIGS["gpt2"], calibration(*layers)).sizes
    assert len(set(plan.sizes)) == 1 and len(set(apart)) == 3
    assert vars(plan.sizes[0]) == {name: max(getattr(size, name) for size in apart) for name in vars(plan.sizes[0])}


WIDEST = "with a margin of 2 they may span 2048, and 1 over their middle has 13 fraction bits;"
GPT2_ERRORS = [
    ({"attention_squares": (1.0, 513.0)}, f"layer 1, attention norm: mean squares from 1 to 513 .* {WIDEST}"),
    ({"ffn_squares": (1e-3, 1.0)}, f"layer 1, ffn norm: mean squares from 0.001 to 1 .* {WIDEST}"),
    ({"log_sum": (-1.0, 12.0)}, "layer 1: the log of a softmax's sum is 12.0 above its reference .*; its tables reach 11.9;"),
    ({"relative": (-181.0, 1.0)}, "layer 1: scores fall 181 below their reference .*; the table of exp reaches 181;"),
    ({"activation": (-50.0, 1.0)}, "layer 1: the activation's inputs from -50 to 1 .*, with a margin of 1.3, exceed"),
    ({"activation": (-1.0, 50.0)}, "layer 1: the activation's inputs from -1 to 50 "),
]


@pytest.mark.parametrize(("change", "message"), GPT2_ERRORS)
def test_ranges_beyond_every_table(change, message):
    """One line that names the layer, the quantity, what it was, and what helps."""
    with pytest.raises(UserError, match=message) as caught:
        plan_model(CONFIGS["gpt2"], calibration(QUIET, replace(QUIET, **change), QUIET))
    assert str(caught.value).endswith("give the model a prefix that takes its outliers (prefix in the model's config)")
    assert "\n" not in str(caught.value)


WIDE = LayerShape("gpt2", 768, 12, 12, 3072, 31).config()


def test_phi_as_the_ring_holds_it():
    """Large mean squares leave phi^2 few bits, fewer beside a wider table: it is served while it brings them near 1."""
    large = replace(QUIET, ffn_squares=(50.0, 200.0))
    spread = replace(QUIET, attention_squares=(0.05, 20.0))
    plan = plan_model(WIDE, calibration(large, spread), programs=1)
    for block_plan, phis, layer in zip(plan.blocks, plan.phis, (large, spread), strict=True):
        check_norm(WIDE, block_plan.norm, phis[0], layer.attention_squares)
        check_norm(WIDE, block_plan.norm, phis[1], layer.ffn_squares)
    line = "layer 0, ffn norm: mean squares from 1e[+]05 to 2e[+]05 .* fraction bits; give"
    with pytest.raises(UserError, match=line):
        plan_model(WIDE, calibration(replace(QUIET, ffn_squares=(1e5, 2e5))))


def test_gates_beyond_every_table():
    for seen in ((-81.0, 1.0), (-1.0, 51.0)):
        with pytest.raises(UserError, match="layer 0: the activation's inputs from"):
            plan_model(CONFIGS["llama"], calibration(replace(QUIET, activation=seen)))


def test_a_final_norm_beyond_every_table():
    with pytest.raises(UserError, match=r"final norm: mean squares from 0\.1 to 100 on the calibration text"):
        plan_model(CONFIGS["opt"], calibration(QUIET, final=(0.1, 100.0)))


def test_experts_beyond_every_table():
    """Logits as far above their mean as tables of the sum reach, and a little further."""
    config = CONFIGS["mixtral"]
    line = (
        "an expert's logit is 8.0 above the mean of its router on the calibration text; tables of the weights' sum reach 6.6; use"
    )
    with pytest.raises(UserError, match=line):
        plan_model(config, calibration(QUIET, replace(QUIET, router=(-1.0, 8.0))))
    plan = plan_model(config, calibration(QUIET, replace(QUIET, router=(-1.0, 6.6))))
    assert plan.blocks[0].routing.softmax.power is not None


def test_a_sum_of_experts_takes_one_table_if_it_can():
    plan = plan_model(CONFIGS["mixtral"], calibration(QUIET))
    assert plan.blocks[0].routing.softmax.power is None and plan.blocks[0].routing.shift == 0


def traced(config, plan, n):
    """What a layer's program takes of the dealer for n tokens at the end of the context, without compiling it."""
    random, start = np.random.default_rng(0), config.positions - n
    place = window(config, start, n, config.positions)
    layer = with_reference(fold_layer(config, random_params(config, random)), np.zeros((config.width + 3, config.heads)))
    encoded = encode_layer(layer, plan.blocks[0].norm, plan.phis[0])
    moduli = 50 if config.rope_base is None else 38, 50  # what `append` leaves of rows, the keys' being rotated
    rows = [Fixed(np.zeros(cache_shape(config, config.positions), np.int64), BITS, modulus) for modulus in moduli]
    x = Fixed(np.zeros((n, config.width), np.int64), STREAM_BITS)
    where = Place(np.int64(start), place.mask.astype(np.int64)), encode_angles(place.cos, place.sin, start)
    arguments = (encoded, x, RowCache(*rows), *where)
    leaves, tree = jax.tree_util.tree_flatten(arguments)
    at = next(i for i, leaf in enumerate(leaves) if leaf is rows[0].raw)

    def run(*flat):
        return jax.tree_util.tree_leaves(block(config, plan.blocks[0], *tree.unflatten(flat)))

    with enable_x64():
        shapes = [jax.ShapeDtypeStruct(np.shape(leaf), np.int64) for leaf in leaves]
        return with_material(run, shapes, {at: "keys", at + 1: "values"}, {}).specification


@pytest.mark.parametrize("change", [{}, {"relative": (-150.0, 3.0), "log_sum": (-1.0, 9.0)}, {"router": (-1.0, 6.0)}])
@pytest.mark.parametrize("family", CONFIGS)
def test_keys_are_those_of_a_traced_layer(family, change):
    """Each lookup of the layer's program, byte for byte but for the last bits of a tree's turns."""
    config = CONFIGS[family]
    plan = plan_model(config, calibration(replace(QUIET, **change)))
    looked = [deal for deal in traced(config, plan, 1).deals if isinstance(deal, Looked)]
    sent = sum(Correction.size(prod(deal.shape), deal.table.depth, deal.table.payload_words) for deal in looked)
    foretold = dealer_bytes(config, plan.blocks[0], config.positions - 1)
    assert foretold <= sent < foretold + len(looked)
