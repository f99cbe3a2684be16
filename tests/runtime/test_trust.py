"""Programs that would use SPU's own triples are refused by name; what is let through sends nothing but openings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from spu_llm.dealer.table import Table
from spu_llm.errors import UserError
from spu_llm.primitives import functions
from spu_llm.primitives.argmax import argmax
from spu_llm.primitives.attention import Place, RowCache, SoftmaxPlan, attend, softmax
from spu_llm.primitives.compare import is_negative, less, maximum, relu
from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.norm import NormPlan, norm_dot, root_table
from spu_llm.primitives.permute import shuffle
from spu_llm.primitives.scale import scale
from spu_llm.primitives.select import embed, one_hot, select
from spu_llm.primitives.squares import weighted_squares
from spu_llm.primitives.topk import top_k_mask
from spu_llm.primitives.truncate import truncate
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted
from spu_llm.runtime.program import compile_program
from spu_llm.runtime.trust import check_trust

WHOLE, REAL, INDEX = Slot((4, 4), np.int64), Slot((4, 4), np.float64), Slot((2,), np.int64)
PUBLIC, PUBLIC_REAL, PLACE = (
    Slot((4, 4), np.int64, public=True),
    Slot((4, 4), np.float64, public=True),
    Slot((2,), np.int64, public=True),
)

REFUSED = {
    "product": (lambda x, y: x * y, (WHOLE, WHOLE), "multiply"),
    "square": (lambda x: x * x, (WHOLE,), "multiply"),
    "power": (lambda x: x**3, (WHOLE,), "multiply"),
    "dot": (lambda x, y: x @ y, (WHOLE, WHOLE), "dot"),
    "batched dot": (lambda x, y: jnp.einsum("nk,nk->n", x, y), (WHOLE, WHOLE), "dot_general"),
    "convolution": (lambda x, y: jax.lax.conv(x[None, None], y[None, None], (1, 1), "SAME"), (WHOLE, PUBLIC), "convolution"),
    "product of reals and a public number": (lambda x: x * 0.5, (REAL,), "multiply"),
    "product of public reals": (lambda x, y: x * y, (REAL, PUBLIC_REAL), "multiply"),
    "dot with public reals": (lambda x, y: x @ y, (REAL, PUBLIC_REAL), "dot"),
    "mean": (lambda x: jnp.mean(x, 0), (REAL,), "multiply"),
    "division": (lambda x, y: x / y, (REAL, REAL), "divide"),
    "public over secret": (lambda x: 1 / x, (REAL,), "reciprocal"),
    "whole division": (lambda x: x // 3, (WHOLE,), ""),
    "comparison": (lambda x, y: x < y, (WHOLE, WHOLE), "less"),
    "comparison with a public number": (lambda x: x < 3, (WHOLE,), "less"),
    "equality": (lambda x, y: x == y, (WHOLE, WHOLE), "equal"),
    "truth": (lambda x: x.astype(bool), (WHOLE,), ""),
    "maximum of two": (lambda x, y: jnp.maximum(x, y), (WHOLE, WHOLE), ""),
    "maximum along an axis": (lambda x: jnp.max(x, 0), (WHOLE,), "reduce"),
    "product along an axis": (lambda x: jnp.prod(x, 0), (WHOLE,), "reduce"),
    "all along an axis": (lambda x: jnp.all(x > 0, 0), (WHOLE,), ""),
    "window maximum": (
        lambda x: jax.lax.reduce_window(x, np.int64(-9), jax.lax.max, (2, 2), (1, 1), "VALID"),
        (WHOLE,),
        "reduce_window",
    ),
    "argmax": (lambda x: jnp.argmax(x, 0), (WHOLE,), "reduce"),
    "sort": (lambda x: jnp.sort(x, 0), (WHOLE,), ""),
    "absolute": (lambda x: jnp.abs(x), (WHOLE,), ""),
    "rows at secret places": (lambda x, i: x[i], (WHOLE, INDEX), ""),
    "public rows at secret places": (lambda x, i: x[i], (PUBLIC, INDEX), ""),
    "written at secret places": (lambda x, i: x.at[i].set(0), (WHOLE, INDEX), ""),
    "slice at secret places": (lambda x, i: jax.lax.dynamic_slice(x, (i[0], i[1]), (1, 1)), (WHOLE, INDEX), ""),
    "choice by a secret": (lambda x, y: jnp.where(x > 0, y, 0), (WHOLE, WHOLE), "less"),
    "shift right": (lambda x: x >> 3, (WHOLE,), "shift_right_arithmetic"),
    "low bits": (lambda x: x & 7, (WHOLE,), "and"),
    "xor": (lambda x, y: x ^ y, (WHOLE, WHOLE), "xor"),
    "truncation to whole numbers": (lambda x: x.astype(jnp.int64), (REAL,), "convert"),
    "whole numbers as reals": (lambda x: x.astype(jnp.float64), (WHOLE,), "convert"),
    "exponential": (lambda x: jnp.exp(x), (REAL,), "exponential"),
    "product in a branch": (lambda p, x: jax.lax.cond(p[0, 0] > 0, lambda a: a * a, lambda a: a, x), (PUBLIC, WHOLE), "multiply"),
    "product in a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v * v, x), (WHOLE,), "while"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, slots, operation = REFUSED[name]
    with pytest.raises(UserError) as caught:
        check_trust(compile_program(function, slots, name))
    message = str(caught.value)
    assert message.startswith(f"program {name}: {operation}")
    assert " of secrets would use SPU's own triples; use a primitive of spu_llm for it: " in message
    assert "pphlo." in message
    assert "\n" not in message


LOCAL = {
    "sums": (lambda x, y: (x + y, x - y, -x, x + 3), (WHOLE, WHOLE)),
    "sums of reals": (lambda x, y: (x + y, x - y + 0.5), (REAL, REAL)),
    "sum along an axis": (lambda x: jnp.sum(x, 0), (WHOLE,)),
    "sum of reals along an axis": (lambda x: jnp.sum(x), (REAL,)),
    "product of public whole numbers": (lambda x, y: (x * y, 3 * x), (WHOLE, PUBLIC)),
    "dot with public whole numbers": (lambda x, y: (x @ y, y @ x), (WHOLE, PUBLIC)),
    "public products": (lambda x, y, z: (x + y * z, jnp.where(y > 0, z, 0)), (WHOLE, PUBLIC, PUBLIC)),
    "moves": (lambda x: (x.T, x.reshape(2, 8), x[1:3, ::2], x[::-1], jnp.roll(x, 1, 0), jnp.pad(x, 1)), (WHOLE,)),
    "joined": (lambda x, y: (jnp.concatenate([x, y]), jnp.stack([x, y]), jnp.broadcast_to(x, (2, 4, 4))), (WHOLE, PUBLIC)),
    "rows at public places": (lambda x, i: (x[i], jax.lax.dynamic_slice(x, (i[0], i[1]), (1, 1))), (WHOLE, PLACE)),
    "written at public places": (lambda x, y, i: jax.lax.dynamic_update_slice(x, y[:1, :1], (i[0], i[1])), (WHOLE, WHOLE, PLACE)),
    "multiplied by a public mask": (lambda x, y: jnp.where(y > 0, x, 0), (WHOLE, PUBLIC)),
    "ring integers of reals": (lambda x: jax.lax.bitcast_convert_type(x, jnp.int64), (REAL,)),
    "other whole numbers": (lambda x: x.astype(jnp.int32), (WHOLE,)),
}


@pytest.mark.parametrize("name", LOCAL)
def test_let_through_and_indeed_local(name):
    """Run, it sends nothing."""
    function, slots = LOCAL[name]
    with Session(ProtocolConfig()) as session:
        program = session.compile(name, function, slots)
        check_trust(program)
        for i, slot in enumerate(slots):
            value = np.ones(slot.shape, slot.dtype)
            session.publish(f"in{i}", value) if slot.public else session.share(f"in{i}", value, "client")
        outputs = [f"out{i}" for i in range(program.outputs.num_leaves)]
        with session.phase("run") as phase:
            session.run(program, tuple(f"in{i}" for i in range(len(slots))), program.outputs.unflatten(outputs))
    assert (phase.bytes, phase.messages) == (0, 0)


SIGMOID = Table(special.expit, jax.nn.sigmoid, -8.0, 16, 0, 2)
SOFTMAX = SoftmaxPlan(
    functions.exponential(-8.0, 3.0, 16, 0, 4), functions.reciprocal(0.5, 30.0, 16), functions.power_of_two(16, -1)
)
NORM = NormPlan(root_table(4, 0.25, 4.0, segments=16))


def attention(x):
    rows = x[:1].reshape(1, 2, 2)
    cache = RowCache(x.reshape(4, 2, 2), x.reshape(4, 2, 2))
    place = Place(jnp.int64(1), np.ones((1, 2), np.int64))
    return attend(rows.reshape(1, 2, 1, 2), rows, rows, cache, place, SOFTMAX)


SHIPPED = {
    "truncate": lambda x: truncate(x, 4),
    "contract": lambda x: (contract("nk,km->nm", x, x), contract("nk,nk->n", x, x, 4, 4)),
    "scale": lambda x: scale(x, x[:, :1], 4, 4),
    "lookup": lambda x: lookup(x, SIGMOID),
    "lookup, spread": lambda x: lookup(x[0], functions.power_of_two(1024, -3)),
    "lookup, exponential": lambda x: lookup(x, SOFTMAX.exp),
    "softmax": lambda x: softmax(x, np.ones(4, np.int64), SOFTMAX),
    "norm": lambda x: norm_dot(x, x, NORM, Fixed(x.raw[0, 0], 8)),
    "weighted_squares": lambda x: weighted_squares(x, Fixed(x.raw[0, 0], 8), 9, 1e-5),
    "attention": attention,
    "compare": lambda x: (is_negative(x, 30), less(x, x, 40), relu(x), maximum(x, x, 20)),
    "argmax": lambda x: (argmax(x, bits=20), argmax(x.reshape(-1)[:, None] + x[:1], 0, bits=20)),
    "top_k_mask": lambda x: top_k_mask(x, 2, 20),
    "shuffle": lambda x: shuffle(x, x),
    "one_hot": lambda x: one_hot(Fixed(x.raw, 0), 5),
    "select": lambda x: select(x, Fixed(x.raw[0], 0)),
    "embed": lambda x: embed(x.reshape(2, 2, 4), Fixed(x.raw[:, :2], 0)),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_primitive_passes(name):
    """Compiling checks; so does this, and that it holds more than openings of the material."""
    with Session(ProtocolConfig()) as session:
        compiled = Assisted(session).compile(
            name,
            lambda x: [leaf.raw for leaf in jax.tree_util.tree_leaves(SHIPPED[name](x), is_leaf=lambda v: isinstance(v, Fixed))],
            (Fixed(Slot((4, 4), np.int64), 24),),
            (),
        )
        check_trust(compiled.program)
        assert compiled.program.reveals > 0


def test_dealer_programs_are_checked_when_compiled():
    with Session(ProtocolConfig()) as session:
        assisted = Assisted(session)
        slots = (Fixed(Slot((4, 4), np.int64), 24),)
        with pytest.raises(UserError, match="program mixed: multiply of secrets would use SPU's own triples"):
            assisted.compile("mixed", lambda x: (truncate(x, 4).raw * x.raw,), slots, (None,))
