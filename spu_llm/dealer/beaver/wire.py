"""SPU's requests and answers as bytes: Protobuf or its JSON over HTTP, and answers in frames of one body.

Fields and numbers are those of SPU's `ttp_server/service.proto`; brpc sends JSON over HTTP/1.1 and Protobuf over HTTP/2. An answer
is a sequence of frames: one byte (0 for data, else an error's code), the length in 8 bytes, little-endian, and that many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from .refusal import Refusal

SERVICE = "spu.mpc.semi2k.beaver.ttp_server.BeaverService"
JSON, PROTOBUF = "application/json", "application/proto"
DATA = 0
_PACKAGE = SERVICE.rpartition(".")[0]
_MERSENNE = 2  # of the element types
_AND_WIDTH = 16  # bitwise requests name no width: SPU draws them as 128-bit elements

_Field = descriptor_pb2.FieldDescriptorProto
_UINT32, _UINT64, _INT64 = _Field.TYPE_UINT32, _Field.TYPE_UINT64, _Field.TYPE_INT64
_BOOL, _BYTES, _ENUM, _MESSAGE = _Field.TYPE_BOOL, _Field.TYPE_BYTES, _Field.TYPE_ENUM, _Field.TYPE_MESSAGE
_ONE, _MANY = _Field.LABEL_OPTIONAL, _Field.LABEL_REPEATED

_MESSAGES: dict[str, tuple[tuple[str, int, int, int, str | None], ...]] = {
    "PrgBufferMeta": (
        ("prg_count", 1, _UINT64, _ONE, None),
        ("buffer_len", 2, _UINT64, _ONE, None),
        ("encrypted_seeds", 3, _BYTES, _MANY, None),
        ("transpose", 4, _BOOL, _ONE, None),
    ),
    "PrgRandPermMeta": (
        ("prg_count", 1, _UINT64, _ONE, None),
        ("size", 2, _INT64, _ONE, None),
        ("encrypted_seeds", 3, _BYTES, _ONE, None),
    ),
}
_INPUTS = ("prg_inputs", 1, _MESSAGE, _MANY, "PrgBufferMeta")
_WIDTH = ("field_size", 2, _UINT32, _ONE, None)
_ELEMENTS = ("element_type", 3, _ENUM, _ONE, "ElType")
_BITS = ("bits", 3, _UINT32, _ONE, None)
_REQUESTS = {
    "AdjustMul": (_INPUTS, _WIDTH, _ELEMENTS),
    "AdjustMulPriv": (_INPUTS, _WIDTH, _ELEMENTS),
    "AdjustSquare": (_INPUTS, _WIDTH),
    "AdjustDot": (
        _INPUTS,
        ("transpose_inputs", 2, _BOOL, _MANY, None),
        ("field_size", 3, _UINT32, _ONE, None),
        ("M", 4, _UINT64, _ONE, None),
        ("N", 5, _UINT64, _ONE, None),
        ("K", 6, _UINT64, _ONE, None),
    ),
    "AdjustAnd": (_INPUTS,),
    "AdjustTrunc": (_INPUTS, _WIDTH, _BITS),
    "AdjustTruncPr": (_INPUTS, _WIDTH, _BITS),
    "AdjustRandBit": (_INPUTS, _WIDTH),
    "AdjustEqz": (_INPUTS, _WIDTH),
    "AdjustPerm": (_INPUTS, _WIDTH, ("perm", 3, _MESSAGE, _ONE, "PrgRandPermMeta")),
}


@dataclass(frozen=True)
class Drawn:
    """What every party draws from its stream at one counter: an array of `size` bytes a party."""

    count: int
    size: int
    seeds: tuple[bytes, ...]
    """The parties' seeds, encrypted, by rank."""


@dataclass(frozen=True)
class Permuted:
    """The permutation of n elements that one party draws."""

    count: int
    n: int
    seed: bytes


@dataclass(frozen=True)
class Request:
    """One call, as it was sent: not checked yet."""

    kind: str
    inputs: tuple[Drawn, ...]
    width: int
    mersenne: bool = False
    bits: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    """m, n, k of a matrix product [m, k] x [k, n]."""
    transposed: tuple[bool, ...] = ()
    permuted: Permuted | None = None


def kind_of(path: str) -> str | None:
    """The request kind that an HTTP path names, or None."""
    service, _, name = path.strip("/").partition("/")
    return name if service == SERVICE and name in _REQUESTS else None


def read_request(kind: str, content_type: str, body: bytes) -> Request:
    """Raises Refusal for a body that is no message of this kind."""
    message = _CLASSES[kind + "Request"]()
    try:
        if content_type == PROTOBUF:
            message.ParseFromString(body)
        else:
            json_format.Parse(body, message)
    except (json_format.ParseError, DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is no {kind}Request: {' '.join(str(error).split())}") from None
    inputs = tuple(Drawn(each.prg_count, each.buffer_len, tuple(each.encrypted_seeds)) for each in message.prg_inputs)
    extra: dict[str, Any] = {}
    if kind == "AdjustDot":
        extra = {"shape": (message.M, message.N, message.K), "transposed": tuple(message.transpose_inputs)}
    elif kind == "AdjustPerm":
        extra = {"permuted": Permuted(message.perm.prg_count, message.perm.size, message.perm.encrypted_seeds)}
    elif kind in ("AdjustMul", "AdjustMulPriv"):
        extra = {"mersenne": message.element_type == _MERSENNE}
    elif kind in ("AdjustTrunc", "AdjustTruncPr"):
        extra = {"bits": message.bits}
    return Request(kind, inputs, _AND_WIDTH if kind == "AdjustAnd" else message.field_size, **extra)


def frame(code: int, data: bytes | memoryview) -> bytes:
    """One frame of an answer."""
    return b"".join((bytes([code]), len(data).to_bytes(8, "little"), data))


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="beaver.proto", package=_PACKAGE, syntax="proto3")
    elements = file.enum_type.add(name="ElType")
    for number, name in enumerate(("UNSPECIFIED", "RING", "GFMP")):
        elements.value.add(name=name, number=number)
    names = []
    for name, fields in (*_MESSAGES.items(), *((kind + "Request", fields) for kind, fields in _REQUESTS.items())):
        message = file.message_type.add(name=name)
        for field, number, type_, label, of in fields:
            message.field.add(name=field, number=number, type=type_, label=label, type_name=of and f".{_PACKAGE}.{of}")
        names.append(name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names}


_CLASSES = _classes()
