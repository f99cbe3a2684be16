"""A JAX function compiled for SPU once, to be run on any variables of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64
from spu import libspu
from spu.utils import frontend

_SMALL = 1 << 25  # elements of all inputs; what is made of them in between has about the same size


@dataclass(frozen=True)
class Slot:
    """One input of a program: its shape and type, and whether every party may know its value."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    public: bool = False


@dataclass(frozen=True)
class Program:
    """Compiled code. `inputs` and `outputs` are tree structures whose leaves are variable names at run time."""

    name: str
    code: str
    inputs: jax.tree_util.PyTreeDef
    outputs: jax.tree_util.PyTreeDef

    def executable(self, arguments: Any, results: Any) -> libspu.Executable:
        """Bind the program to named variables: trees of names shaped like its arguments and its results."""
        return libspu.Executable(
            name=self.name,
            input_names=self.inputs.flatten_up_to(arguments),
            output_names=self.outputs.flatten_up_to(results),
            code=self.code,
        )

    @property
    def reveals(self) -> int:
        """How many openings to everyone the program contains."""
        return self.code.count("spu.reveal")


def compile_program(function: Callable, arguments: tuple, name: str) -> Program:
    """Compile `function` for arguments described by a tree of `Slot`s. Runs under 64-bit JAX types: no int64 may shrink."""
    slots, tree = jax.tree_util.tree_flatten(arguments)
    shapes = [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in slots]
    visibility = [libspu.Visibility.VIS_PUBLIC if slot.public else libspu.Visibility.VIS_SECRET for slot in slots]

    def traced(*args: Any) -> Any:
        return function(*args)

    options = libspu.CompilerOptions()
    options.enable_optimize_denominator_with_broadcast = True  # one reciprocal a row, not one an element
    # reading its code takes a third of a small program's time, and half of the code frees what lies there for a moment only
    options.disable_deallocation_insertion = sum(prod(slot.shape) for slot in slots) < _SMALL
    with enable_x64():
        executable, out = frontend.compile(
            frontend.Kind.JAX,
            traced,
            jax.tree_util.tree_unflatten(tree, shapes),
            {},
            [f"in{i}" for i in range(len(slots))],
            visibility,
            lambda leaves: [f"out{i}" for i in range(len(leaves))],
            copts=options,
        )
    code = executable.code
    return Program(name, code.decode() if isinstance(code, bytes) else code, tree, jax.tree_util.tree_structure(out))
