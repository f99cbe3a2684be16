"""One decoding step as encrypted operations: what each takes, gives, and costs in levels, and which slots its values fill.

How a step is laid out. A *linear* operation is any public linear map of slots, layout changes and biases folded in (diagonals and
rotations): one level. It writes any slots, the others are 0. A *product* is slot by slot: one level. A *fold* rotates whole
ciphertexts and adds them: no level, and no mask, so slots that its result does not fill hold what the rotations bring there, which
no later linear map reads and which stays in range. A *shift* adds a constant to every slot: no level. A *series* is a polynomial.
Rows begin with the last, so the last row begins the first ciphertext. `slots.py` has the place of every value.
The mean that a layer norm takes away is folded into the weights that write the residual stream; a norm's scale and bias into the
map after it; rotary positions, which are public, into q and k; a softmax is divided after its product with the values, so that the
sum's reciprocal is computed on one value a row; each function's domain is moved to [-1, 1] by the map before it.
What has a head's width for each pair is *stacked*: a copy of all rows' slots for each position, masked pairs 0 among them, so that
queries are copied, and weighed values added, over positions by rotations of whole copies. Keys and values are kept stacked for one
row, heads that share them repeated; where several rows meet them (a prompt; no cache) the map that makes them writes them for each
row too. Those of past positions stay encrypted at the level they were made at, and are never refreshed: new ones, written in their
places, are added to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import UserError
from ..models.config import DecoderConfig
from . import cutmax
from .polynomials import Degrees, series_depth

Kind = Literal["linear", "product", "fold", "series", "shift"]
Argmax = Literal["tournament", "league", "cutmax", "auto"]

_SIGN_DEGREE = 9


@dataclass(frozen=True)
class Options:
    """What is left out or packed.

    `skip`: no work that cannot reach the output (masked pairs; in the last layer every row but the last). `cache`: keys and values
    of past positions are kept. `pack`: the pieces of an operand share ciphertexts. `argmax`: one against one, or each against all
    others of a group as large as the slots allow, or no comparisons (cutmax.py); "auto" chooses (`Program.argmax`).
    """

    skip: bool = True
    cache: bool = True
    pack: bool = True
    argmax: Argmax = "auto"


@dataclass(frozen=True)
class Span:
    """Rows of a pass: `new` positions after `past` ones whose keys and values are cached."""

    new: int
    past: int
    options: Options

    def attended(self, last: bool) -> list[int]:
        """For each computed row, the positions its scores are computed for; `last`: of the last row only."""
        end = self.past + self.new
        if not self.options.skip:
            return [end] * self.new
        return [end] if last else list(range(self.past + 1, end + 1))


@dataclass(frozen=True)
class Layout:
    """The slots of a value: `pieces` of `size` slots for each row, or for each position that a row attends to (`pairs`).

    `last`: only the last row is needed. `single`: one row, whatever is skipped. `stacked`, of pairs: position above position, all
    rows' pieces in each. A piece is what has a ciphertext to itself unless pieces are packed.
    """

    pieces: int
    size: int
    last: bool = False
    pairs: bool = False
    single: bool = False
    stacked: bool = False

    def values(self, span: Span) -> int:
        """Slots filled with values."""
        return self.pieces * self.size * sum(self.units(span))

    def ciphertexts(self, span: Span, slots: int) -> int:
        """Packed: ceil(values / slots). Else every piece of every row begins one. Stacked: as many whole copies in each as fit."""
        units = self.units(span)
        if span.options.pack:
            row = self.pieces * self.size
            return stacks(max(units), row * len(units), slots) if self.stacked else -(-row * sum(units) // slots)
        each = [stacks(unit, self.size, slots) if self.stacked else -(-unit * self.size // slots) for unit in units]
        return self.pieces * sum(each)

    def units(self, span: Span) -> list[int]:
        """For each row, how many times it has its pieces: once, or for each position attended to."""
        attended = [span.past + span.new] if self.single else span.attended(self.last)
        return attended if self.pairs else [1] * len(attended)


def stacks(positions: int, copy: int, slots: int) -> int:
    """Ciphertexts of so many copies, none of which begins in one ciphertext and ends in another if it fits one."""
    return -(-positions // (slots // copy)) if copy <= slots else positions * -(-copy // slots)


@dataclass(frozen=True)
class Op:
    """One operation: `inputs` -> `output`, `depth` levels below the lowest input.

    Operations of one `block` run without a bootstrap between them where the levels allow; where not, those of one part of it do
    ("norm/root" and "norm/normed" are parts of "norm"). `feeds`: the series that the result is scaled for.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    output: str
    depth: int
    block: str
    feeds: str = ""


@dataclass
class Program:
    """A step: from row `START` of the residual stream (all rows, without a cache) to the next token's, `END`.

    `stored` values are kept for later steps. `groups`: candidates that meet in each round of the argmax.
    """

    config: DecoderConfig
    degrees: Degrees
    options: Options
    slots: int
    ops: list[Op] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    groups: list[int] = field(default_factory=list)

    @property
    def argmax(self) -> Argmax:
        """The one chosen. "auto": a league where all pairs fit a ciphertext (one sign tells the token), else no comparisons."""
        if self.options.argmax != "auto":
            return self.options.argmax
        return "league" if _filled(self.config.vocabulary) ** 2 <= self.slots else "cutmax"

    @property
    def candidates(self) -> int:
        """Slots of the logits: the vocabulary, filled up to a power of two; to whole ciphertexts where nothing is compared."""
        vocabulary = self.config.vocabulary
        return -(-vocabulary // self.slots) * self.slots if self.argmax == "cutmax" else _filled(vocabulary)

    @property
    def sign_degrees(self) -> Degrees:
        """Those of the argmax's signs."""
        return cutmax.sign_degrees(self.degrees) if self.argmax == "cutmax" else self.degrees


def _filled(vocabulary: int) -> int:
    return 1 << (vocabulary - 1).bit_length()


START, END = "embedding", "next"


def build_program(config: DecoderConfig, degrees: Degrees, options: Options, slots: int) -> Program:
    """The step of a GPT-2- or Llama-shaped model. Raises UserError for other families."""
    if config.family not in ("gpt2", "llama"):
        raise UserError(f"family {config.family}: AR-HE runs gpt2 and llama; choose a model of these")
    program = Program(config, degrees, options, slots)
    _Builder(program).build()
    return program


class _Builder:
    """Appends operations in the order they run in."""

    def __init__(self, program: Program):
        self.program = program
        self.config = program.config
        self.degrees = program.degrees
        self.block = ""
        self.last = False

    def build(self) -> None:
        c = self.config
        x = START
        self.program.layouts[START] = Layout(1, c.width)
        for i in range(c.layers):
            x = self._layer(f"layer{i}", x, last=i == c.layers - 1)
        y = self._norm("final", x, Layout(1, c.width, last=True))
        self._argmax(y)

    def _op(self, name: str, kind: Kind, inputs: tuple[str, ...], layout: Layout, feeds: str = "", depth: int | None = None) -> str:
        """Append an operation, whose output has its name; returns the name."""
        if depth is None:
            depth = {"linear": 1, "product": 1, "fold": 0, "series": 0, "shift": 0}[kind]
        self.program.ops.append(Op(name, kind, inputs, name, depth, self.block or name, feeds))
        self.program.layouts[name] = layout
        return name

    def _series(self, name: str, x: str, degree: int, layout: Layout) -> str:
        return self._op(name, "series", (x,), layout, depth=series_depth(degree))

    def _norm(self, part: str, x: str, layout: Layout) -> str:
        """x / sqrt(mean(x^2) + epsilon): the mean square fills the row's slots, so its root's inverse multiplies directly."""
        self.block = f"{part}.norm/root"
        square = self._op(f"{part}.square", "product", (x, x), layout)
        root = f"{part}.inverse_root"
        variance = self._op(f"{part}.variance", "linear", (square,), layout, feeds=root)
        self._series(root, variance, self.degrees.inverse_root, layout)
        self.block = f"{part}.norm/normed"
        return self._op(f"{part}.normed", "product", (x, root), layout)

    def _layer(self, layer: str, x: str, last: bool) -> str:
        c = self.config
        row = Layout(1, c.width, last=last)
        y = self._norm(f"{layer}.attention", x, Layout(1, c.width))
        e = self._weights(layer, y, last)
        out = self._mixed(layer, e, last)
        self.block = f"{layer}.join"
        x = self._op(f"{layer}.attended", "fold", (x, out), row)
        y = self._norm(f"{layer}.ffn", x, row)
        down = self._feed_forward(layer, y, last)
        self.block = f"{layer}.end"
        return self._op(f"{layer}.out", "fold", (x, down), row)

    def _weights(self, layer: str, y: str, last: bool) -> str:
        """exp of the scores; keys and values are appended to what is stored."""
        c = self.config
        self.block = f"{layer}.scores"
        wide = Layout(c.heads, c.head_width, last=last, pairs=True, stacked=True)
        narrow = Layout(c.heads, 1, last=last, pairs=True)
        q = self._op(f"{layer}.q", "linear", (y,), Layout(c.heads, c.head_width, last=last))
        for name in ("k", "v"):
            self._op(f"{layer}.{name}", "linear", (y,), Layout(c.heads, c.head_width, pairs=True, single=True, stacked=True))
        self.program.stored |= {f"{layer}.k", f"{layer}.v"}
        exponential = f"{layer}.exponential"
        dot = self._op(f"{layer}.dot", "product", (q, f"{layer}.k"), wide)
        scores = self._op(f"{layer}.scores", "linear", (dot,), narrow, feeds=exponential)
        self.block = f"{layer}.weights"
        e = self._series(exponential, scores, self.degrees.exponential, narrow)
        for i in range(self.degrees.squarings):
            e = self._op(f"{layer}.squared{i}", "product", (e, e), narrow)
        return e

    def _mixed(self, layer: str, e: str, last: bool) -> str:
        """Values weighted by e, over e's sum, through the output matrix, which reads no slot that the mix left half summed."""
        c = self.config
        row = Layout(c.heads, c.head_width, last=last)
        wide = Layout(c.heads, c.head_width, last=last, pairs=True, stacked=True)
        self.block = f"{layer}.mix/reciprocal"
        reciprocal = f"{layer}.reciprocal"
        total = self._op(f"{layer}.total", "linear", (e,), row, feeds=reciprocal)
        self._series(reciprocal, total, self.degrees.reciprocal, row)
        self.block = f"{layer}.mix/mixed"
        spread = self._op(f"{layer}.spread", "linear", (e,), wide)
        weighed = self._op(f"{layer}.weighed", "product", (spread, f"{layer}.v"), wide)
        mix = self._op(f"{layer}.mix", "fold", (weighed,), row)
        mixed = self._op(f"{layer}.mixed", "product", (mix, reciprocal), row)
        return self._op(f"{layer}.projected", "linear", (mixed,), Layout(1, c.width, last=last))

    def _feed_forward(self, layer: str, y: str, last: bool) -> str:
        c = self.config
        hidden = Layout(1, c.ffn, last=last)
        self.block = f"{layer}.feed_forward"
        activation = f"{layer}.activation"
        up = self._op(f"{layer}.up", "linear", (y,), hidden, feeds=activation)
        h = self._series(activation, up, self.degrees.activation, hidden)
        if c.llama_like:
            beside = self._op(f"{layer}.beside", "linear", (y,), hidden)
            h = self._op(f"{layer}.gated", "product", (h, beside), hidden)
        return self._op(f"{layer}.down", "linear", (h,), Layout(1, c.width, last=last))

    def _sign(self, name: str, x: str, layout: Layout) -> str:
        """Composite sign: its first part in the current block, the others alone, so that a bootstrap may fall between any."""
        degrees = self.program.sign_degrees
        for i in range(degrees.steep + degrees.flat):
            x = self._series(f"{name}.sign{i}", x, _SIGN_DEGREE, layout)
            self.block = ""
        return x

    def _argmax(self, y: str) -> None:
        """The token's one-hot vector, nearly, and its embedding."""
        c, self.block = self.config, ""
        every = Layout(1, self.program.candidates, single=True)
        logits = self._op("logits", "linear", (y,), Layout(1, self.program.candidates, last=True))
        token = self._token(logits, every)
        self.block = "token/next"
        self._op(END, "linear", (token,), Layout(1, c.width, single=True))

    def _token(self, logits: str, every: Layout) -> str:
        """Nearly 1 for the token, 0 elsewhere."""
        if self.program.argmax == "cutmax":
            return self._sign("token", self._cut(logits, every), every)
        if self._group(every.size) == every.size > 2:
            return self._sole_league(logits, every.size)
        return self._sign("token", self._compared(logits, every), every)

    def _cut(self, logits: str, every: Layout) -> str:
        """Without comparisons: twice each candidate's share, less 1."""
        one, x = Layout(1, self.program.slots, single=True), logits
        for step in cutmax.steps(self.degrees, logits):
            self.block = step.block
            depth = series_depth(step.degree) if step.kind == "series" else None
            x = self._op(step.name, step.kind, step.inputs, every if step.wide else one, depth=depth)
        return x

    def _compared(self, logits: str, every: Layout) -> str:
        """Rounds to the largest logit; then each logit less it, and less half of what a sign tells apart."""
        best, left = logits, self.program.candidates
        while left > 1:
            group = self._group(left)
            number = len(self.program.groups)
            self.program.groups.append(group)
            best = (self._duel if group == 2 else self._league)(f"round{number}", best, left, group)
            left //= group
        self.block = "token"
        spread = self._op("best", "linear", (best,), every)
        return self._op("gap", "fold", (logits, spread), every)

    def _group(self, left: int) -> int:
        """The largest group of which all ordered pairs fit one ciphertext."""
        fit = min(left, self.program.slots // left)
        return fit if self.program.argmax == "league" and fit > 2 else 2

    def _duel(self, name: str, x: str, left: int, group: int) -> str:
        """(a + b) / 2 + (a - b) / 2 * sign(a - b), a and b the halves of x."""
        self.block = name
        half = Layout(1, left // group, single=True)
        difference = self._op(f"{name}.difference", "fold", (x,), half)
        middle = self._op(f"{name}.middle", "linear", (x,), half)
        sign = self._sign(name, difference, half)
        lead = self._op(f"{name}.lead", "product", (difference, sign), half)
        return self._op(f"{name}.best", "fold", (middle, lead), half)

    def _league(self, name: str, x: str, left: int, group: int) -> str:
        """The sum in each group of x times the product of its wins (1, or nearly 0) against each other member."""
        self.block = name
        pairs = Layout(1, left * group, single=True)
        difference = self._op(f"{name}.difference", "linear", (x,), pairs)
        kept = self._op(f"{name}.kept", "linear", (x,), Layout(1, left, single=True))  # where the wins are to be
        wins = self._wins(name, difference, left, group)
        chosen = self._op(f"{name}.chosen", "product", (wins, kept), Layout(1, left, single=True))
        return self._op(f"{name}.best", "fold", (chosen,), Layout(1, left // group, single=True))

    def _sole_league(self, x: str, left: int) -> str:
        """Who wins against all others is the token."""
        self.block = "round0"
        self.program.groups.append(left)
        difference = self._op("round0.difference", "linear", (x,), Layout(1, left * left, single=True))
        return self._wins("round0", difference, left, left)

    def _wins(self, name: str, difference: str, left: int, group: int) -> str:
        """Each candidate's product of wins against the members of its group."""
        wins, size = self._sign(name, difference, Layout(1, left * group, single=True)), group
        while size > 1:
            size //= 2
            layout = Layout(1, left * size, single=True)
            wins = self._op(f"{name}.wins{size}", "product", (wins, wins), layout)
        return wins
