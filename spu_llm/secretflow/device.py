"""A session whose parties are those of a SecretFlow device: variables are its SPUObjects, programs run in its runtimes.

Every party's driver, or the one driver on Ray, does the same in the same order. Values are known where they belong only: what
the session is given as arrays has the right shapes, and what counts comes from the ends at the PYUs (`ends.py`).

A call of the device, `spu(f)(...)`, compiles f anew and gives its results in one object. So programs are compiled here, once, in
each party's driver, and handed to the device's runtimes, which is what the device does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike
from spu import libspu

from ..errors import UserError
from ..generation.material import NoParties
from ..runtime import shares
from ..runtime.party import Party
from ..runtime.program import Program, compile_program

_WORD = 8  # bytes of an element of a share


class DeviceSession(NoParties):
    """client, owner: PYUs that are the device's two parties.

    sources: what the ends have for a variable, by (name, shape): PYUObjects of values that "client" and "owner" share, of operands
    "opened" by the owner, and the owner's shares "placed" as chunks.
    """

    def __init__(self, device: Any, client: Any, owner: Any):
        super().__init__()
        self.device = device
        self.variables: dict[str, Any] = {}
        self.pyus = {"client": client, "owner": owner}
        order = list(device.actors)
        self._places = {role: order.index(pyu.party) for role, pyu in self.pyus.items()}
        self._computes = own_party() in (None, *order)
        self.sources: dict[str, Callable[[str, tuple[int, ...]], Any]] = {}

    def share(self, name: str, value: np.ndarray, owner: str) -> None:
        """Share what the owner's end has under this name."""
        self.variables[name] = self.sources[owner](name, value.shape).to(self.device)

    def publish(self, name: str, value: ArrayLike) -> None:
        """Each driver knows the value."""
        meta, info, *chunks = self.device.io.make_shares(np.asarray(value), libspu.Visibility.VIS_PUBLIC)
        self.variables[name] = self._object(meta, self.device.infeed_shares(info, chunks))

    def publish_from(self, name: str, value: np.ndarray, owner: str) -> None:
        self.variables[name] = self.sources["opened"](name, value.shape).to(self.device, spu_vis="public")

    def place_made(self, name: str, make: Callable[[Party], np.ndarray]) -> None:
        """The owner's share from its end, the client's made here: zeros."""
        shape = np.shape(make(SimpleNamespace(rank=0)))  # type: ignore[arg-type]
        zeros = self.pyus["client"](zero_chunks, num_returns=1 + chunk_count(shape))(shape)
        placed = self.sources["placed"](name, shape)
        self.variables[name] = infeed(self.device, {self.pyus["owner"].party: placed, self.pyus["client"].party: zeros}, shape)

    def outfeed(self, name: str, role: str, shape: tuple[int, ...]) -> list[Any]:
        """A role's share of a variable of `shape`, as info and chunks at its PYU. Nothing leaves a party."""
        from secretflow import PYUObject

        pyu = self.pyus[role]
        method = self.device.actors[pyu.party].outfeed_share
        found = method.options(num_returns=1 + chunk_count(shape)).remote(self.variables[name].shares_name[self._places[role]])
        return [PYUObject(pyu, each) for each in found]

    def compile(self, name: str, function: Callable, arguments: tuple) -> Program:
        """Compiled where it will run; the dealer has no use for code."""
        return compile_program(function, arguments, name) if self._computes else super().compile(name, function, arguments)

    def run(self, program: Program, arguments: tuple, results: Any) -> None:
        from secretflow.device.device.spu import SPUCompilerNumReturnsPolicy

        inputs = [self.variables[name] for name in jax.tree_util.tree_leaves(arguments)]
        outputs = jax.tree_util.tree_leaves(results)
        count = len(outputs)
        found = []
        for i, actor in enumerate(self.device.actors.values()):
            executable = libspu.Executable(
                name=program.name, input_names=[""] * len(inputs), output_names=[""] * count, code=program.code
            )
            method = actor.run.options(num_returns=2 * count)
            names = [each.shares_name[i] for each in inputs]
            found.append(method.remote(SPUCompilerNumReturnsPolicy.FROM_COMPILER, None, executable, *names))
        for j, name in enumerate(outputs):
            self.variables[name] = self._object(found[0][j], [each[count + j] for each in found])

    def _object(self, meta: Any, names: Sequence[Any]) -> Any:
        from secretflow import SPUObject

        return SPUObject(self.device, meta, list(names))


def infeed(device: Any, parts: Mapping[str, Sequence[Any]], shape: tuple[int, ...]) -> Any:
    """A secret SPUObject, int64 `shape`, of what each party's PYU has of it: info and chunks (see `to_chunks`). Nothing is sent."""
    from secretflow import SPUObject
    from secretflow.device.device.spu import SPUValueMeta

    names = []
    for party, actor in device.actors.items():
        info, *chunks = parts[party]
        names.append(actor.infeed_share.remote(info.data, *(chunk.data for chunk in chunks)))
    conf, secret = device.conf, libspu.Visibility.VIS_SECRET
    meta = SPUValueMeta(shape, np.dtype(np.int64), secret, conf.protocol, conf.field, conf.fxp_fraction_bits)
    return SPUObject(device, meta, names)


def check_device(device: Any, dealer: Any, parties: Sequence[str] = ()) -> list[str]:
    """The device's parties, in its order. UserError where dealer programs cannot run on it, or it has others than `parties`."""
    found = list(device.actors)
    wrong = {
        f"runs {device.conf.protocol}": device.conf.protocol != libspu.ProtocolKind.SEMI2K,
        f"has the ring {device.conf.field}": device.conf.field != libspu.FieldType.FM64,
        f"has the parties {', '.join(found)}": len(found) != 2 or sorted(parties or found) != sorted(found),
    }
    for what, bad in wrong.items():
        if bad:
            raise UserError(
                f"the SPU device {what}; make it with protocol SEMI2K, field FM64 and two parties"
                + "".join(f", {name}" for name in parties)
            )
    if dealer.party in found:
        raise UserError(f"the dealer {dealer.party} is a party of the SPU device: it could unmask what it opens; use another PYU")
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise UserError("64-bit values would shrink to 32 bits on their way to SPU; set JAX_ENABLE_X64=1 for every process")
    return found


def own_party() -> str | None:
    """The party of this driver; None where one driver serves all."""
    from secretflow.device import global_state

    return global_state.self_party()


def chunk_count(shape: tuple[int, ...]) -> int:
    """Into how many chunks SPU cuts a share."""
    return max(1, -(-_WORD * prod(shape) // shares.CHUNK_BYTES))


def zero_chunks(shape: tuple[int, ...]) -> Any:
    """The client's share of an operand that is the owner's."""
    return to_chunks(np.zeros(shape, np.int64))


def to_chunks(words: np.ndarray) -> Any:
    """A party's additive share as its SPU takes it: SecretFlow's info, and chunks."""
    from secretflow.device.device.spu import SPUIOInfo

    share = shares.additive(words, "FM64")
    chunks = list(share.share_chunks)
    return SPUIOInfo(0, len(chunks), share.meta), *chunks


def to_share(info: Any, chunks: Sequence[bytes]) -> libspu.Share:
    """The inverse: SPU's share."""
    share = libspu.Share()
    share.meta, share.share_chunks = info.meta, list(chunks)
    return share
