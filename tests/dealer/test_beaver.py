"""The Beaver server against SPU's own client, and its correlations against Python's integers."""

import base64
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from gmssl_pyx import sm2_encrypt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spu import Io, Runtime, libspu
from spu.experimental import make_cached_var
from spu.utils import frontend

from spu_llm.cli.beaver import beaver_command
from spu_llm.dealer.beaver import server as server_module
from spu_llm.dealer.beaver.keys import load_key
from spu_llm.dealer.beaver.ring import FIELDS, RINGS
from spu_llm.dealer.beaver.seeds import SeedMemory
from spu_llm.dealer.beaver.server import BeaverServer
from spu_llm.dealer.beaver.wire import SERVICE
from spu_llm.errors import UserError
from spu_llm.network.certificates import Identity, make_certificates
from spu_llm.runtime.beaver import BeaverConfig, with_third_party

FRACTION = {"FM32": 8, "FM64": 18, "FM128": 26}
SOON_MS = 1000  # how long a party waits for another that, in this test, will have failed
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    return load_key(tmp_path_factory.mktemp("beaver") / "key")


@pytest.fixture(scope="module")
def server(key):
    with BeaverServer("127.0.0.1:0", key) as server:
        yield server


@pytest.fixture(scope="module")
def public_key(key, tmp_path_factory):
    path = tmp_path_factory.mktemp("beaver") / "key.pub"
    path.write_text(key.public_pem)
    return path


def spu_config(beaver, parties=2, ring="FM64", identity=None, **options):
    config = libspu.RuntimeConfig(
        protocol=libspu.ProtocolKind.SEMI2K, field=getattr(libspu.FieldType, ring), fxp_fraction_bits=FRACTION[ring]
    )
    for name, value in options.items():
        setattr(config, name, value)
    return with_third_party(config, beaver, parties, identity)


def run(function, arguments, config, parties=2, wait_ms=60_000, pause=None):
    """A function between SPU parties on threads, each with a runtime of its own; the first party's error if any has one."""
    io, n = Io(parties, config), len(arguments)
    secret = libspu.Visibility.VIS_SECRET
    shares = [io.make_shares(argument, secret) for argument in arguments]
    names = [f"in{i}" for i in range(n)]
    executable, out = frontend.compile(
        frontend.Kind.JAX, function, arguments, {}, names, [secret] * n, lambda leaves: [f"out{i}" for i in range(len(leaves))]
    )
    desc = libspu.link.Desc()
    desc.id, desc.recv_timeout_ms = uuid.uuid4().hex, wait_ms
    for rank in range(parties):
        desc.add_party(f"party{rank}", f"{desc.id}-{rank}")

    def party(rank):
        runtime = Runtime(libspu.link.create_mem(desc, rank), libspu.RuntimeConfig(config))
        for name, share in zip(names, shares, strict=True):
            runtime.set_var(name, share[rank])
        runtime.run(executable)
        if pause:  # and once more
            time.sleep(pause)
            runtime.run(executable)
        return [runtime.get_var(name) for name in executable.output_names]

    with ThreadPoolExecutor(parties) as threads:
        futures = [threads.submit(party, rank) for rank in range(parties)]
    results = [future.result() for future in futures]
    leaves = [io.reconstruct(list(each)) for each in zip(*results, strict=True)]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(out), leaves)


# --- SPU's client ---------------------------------------------------------------------------------------------------------


def every_operation(x, y, i):
    """Products, comparisons, sorting and equality; `i` are integers."""
    return {
        "dot": x @ y,
        "mul": x * x[::-1],
        "square": x * x,
        "positive": jnp.maximum(x, 0),
        "sorted": jnp.sort(y[:, 0]),
        "argmax": jnp.argmax(x, axis=1),
        "equal": i == i[::-1],
        "integers": i * i[::-1],
    }


CALLS = {"AdjustMul", "AdjustDot", "AdjustAnd", "AdjustRandBit", "AdjustPerm", "AdjustEqz"}


@pytest.mark.parametrize(
    ("ring", "parties", "transport"),
    [
        ("FM32", 2, "http"),
        ("FM64", 2, "h2"),
        ("FM128", 2, "http"),
        ("FM32", 3, "h2"),
        ("FM64", 3, "http"),
        ("FM128", 3, "h2"),
    ],
)
def test_operations_are_those_of_numpy(server, public_key, ring, parties, transport):
    random = np.random.default_rng(parties)
    x, y = random.normal(size=(3, 5)).astype(np.float32), random.normal(size=(5, 1)).astype(np.float32)
    i = np.array([0, -7, 12, 12, 3], np.int32)[:, None] * np.array([[1, 1]], np.int32)
    before = dict(server.served.requests)
    beaver = BeaverConfig(address=server.address, public_key=public_key, transport=transport, adjust_rank=parties - 1)
    got = run(every_operation, (x, y, i), spu_config(beaver, parties, ring), parties)
    for name, want in every_operation(x, y, i).items():
        np.testing.assert_allclose(got[name], want, atol=12 * 2 ** -FRACTION[ring] + 1e-6, err_msg=name)
    seen = {kind for kind, count in server.served.requests.items() if count > before.get(kind, 0)}
    assert seen >= CALLS | {"AdjustMulPriv" if parties == 2 else "AdjustTruncPr"}


@pytest.mark.parametrize("ring", ["FM32", "FM64", "FM128"])
def test_truncation_pairs(server, public_key, ring):
    x = np.linspace(-3, 3, 11, dtype=np.float32)
    before = server.served.requests["AdjustTrunc"]
    config = spu_config(BeaverConfig(address=server.address, public_key=public_key), 3, ring, trunc_allow_msb_error=True)
    np.testing.assert_allclose(run(lambda x: x * x[::-1], (x,), config, 3), x * x[::-1], atol=12 * 2 ** -FRACTION[ring])
    assert server.served.requests["AdjustTrunc"] == before + 1


def test_products_in_a_prime_field(server, public_key):
    """SPU's exponential by a Mersenne prime, which only FM128 has."""
    x = np.linspace(-4, 3, 37, dtype=np.float32)
    mode = libspu.RuntimeConfig.ExpMode.EXP_PRIME
    beaver = BeaverConfig(address=server.address, public_key=public_key)
    config = spu_config(beaver, ring="FM128", fxp_exp_mode=mode, experimental_enable_exp_prime=True)
    np.testing.assert_allclose(run(jnp.exp, (x,), config), np.exp(x), rtol=1e-5, atol=1e-6)


def test_long_arrays_come_in_pieces(server, public_key):
    i = np.arange(-150_001, 150_002, dtype=np.int64)
    config = spu_config(BeaverConfig(address=server.address, public_key=public_key))
    assert (run(lambda i: i * i[::-1], (i,), config) == i * i[::-1]).all()


def test_sessions_at_the_same_time(server, public_key):
    def session(seed):
        x = np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)
        transport = ("http", "h2")[seed % 2]
        config = spu_config(BeaverConfig(address=server.address, public_key=public_key, transport=transport))
        return np.abs(np.asarray(run(lambda x: jnp.maximum(x @ x, 0), (x,), config)) - np.maximum(x @ x, 0)).max()

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(session, range(4))) < 1e-3


def test_another_servers_key_is_refused(server, public_key, tmp_path):
    other = tmp_path / "other.pub"
    other.write_text(load_key(tmp_path / "other").public_pem)
    with pytest.raises(RuntimeError, match=r"SeedDecryptError.*not encrypted under this server's key"):
        config = spu_config(BeaverConfig(address=server.address, public_key=other))
        run(jnp.square, (np.ones(2, np.float32),), config, wait_ms=SOON_MS)
    config = spu_config(BeaverConfig(address=server.address, public_key=public_key))
    assert run(lambda i: i * i, (np.array([3]),), config) == 9  # the server is well


def test_masks_of_cached_operands(server, public_key, monkeypatch):
    """SPU's client would use the masks of a cached operand again; it does not if an elementwise product comes first."""
    asked = []
    check = server_module.check
    monkeypatch.setattr(server_module, "check", lambda request: (asked.append(request), check(request)))
    x, w = np.ones((2, 3), np.float32), np.arange(12.0, dtype=np.float32).reshape(3, 4)
    config = spu_config(BeaverConfig(address=server.address, public_key=public_key))
    with pytest.raises(RuntimeError, match=r"masks overlap.*do not cache"):
        run(lambda x, w: x @ make_cached_var(w), (x, w), config, wait_ms=SOON_MS)

    def once_and_twice(x, w):
        w = make_cached_var(w)
        return w * w, x @ w, (2 * x) @ w

    asked.clear()
    got = run(once_and_twice, (x, w), config)
    np.testing.assert_allclose(got[2], 2 * x @ w, atol=1e-3)
    ranges = {(drawn.count, drawn.count + -(-drawn.size // 16)) for request in asked for drawn in request.inputs}
    used = [block for start, end in ranges for block in range(start, end)]
    assert len(used) == len(set(used)), "masks that are not the same, cached, operand's must be different numbers"
    assert sum(len(request.inputs) for request in asked) == len(ranges) + 2  # w's mask is in three requests


# --- correlations -----------------------------------------------------------------------------------------------------------


class Clients:
    """Parties written anew, with Python's integers: what each would draw, and what they would ask the server."""

    def __init__(self, server, parties=2):
        self.server = server
        public = base64.b64decode("".join(server.public_pem.split("\n")[1:-2]))[-64:]
        self.seeds = [os.urandom(16) for _ in range(parties)]
        self.encrypted = [base64.b64encode(sm2_encrypt(public, seed)).decode() for seed in self.seeds]

    def ask(self, kind, body, path=None, content_type="application/json"):
        """(error code, bytes or text) of the answer."""
        connection = http.client.HTTPConnection(self.server.address)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path or f"/{SERVICE}/{kind}", data, {"Content-Type": content_type})
        response = connection.getresponse()
        found = response.read()
        connection.close()
        if response.status != 200:
            return response.status, found.decode()
        code, data = 0, b""
        while found:
            code, size = found[0], int.from_bytes(found[1:9], "little")
            data, found = data + found[9 : 9 + size], found[9 + size :]
        return (code, data.decode()) if code else (0, data)

    def drawn(self, count, n, width):
        return {"prg_count": count, "buffer_len": n * width, "encrypted_seeds": self.encrypted}

    def ring(self, rank, count, n, width):
        """n elements: AES of the counters."""
        aes = Cipher(algorithms.AES(self.seeds[rank]), modes.ECB()).encryptor()
        blocks = b"".join(aes.update((count + i).to_bytes(16, "little")) for i in range(-(-n * width // 16)))
        return integers(blocks[: n * width], width)

    def field(self, rank, count, n, width, bits):
        """n elements of the prime field: 40 bits more than 31, or exactly 61 or 127 bits with the prime standing for 0."""
        size = 9 if width == 4 else width
        aes = Cipher(algorithms.AES(self.seeds[rank]), modes.CTR(count.to_bytes(16, "little"))).encryptor()
        drawn = integers(aes.update(bytes(n * size)), size)
        prime = 2**bits - 1
        return [(value if width == 4 else value & prime) % prime for value in drawn]


def integers(data, width):
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


widths = st.sampled_from([4, 8, 16])


@FEW
@given(width=widths, n=st.integers(1, 40), parties=st.sampled_from([2, 3]), count=st.sampled_from([0, 5, 2**62]), data=st.data())
def test_correlations_in_rings(server, width, n, parties, count, data):
    clients = Clients(server, parties)
    counts = [count + 3 * 40 * i for i in range(3)]
    bits = data.draw(st.integers(0, 8 * width - 2))
    size, half = 2 ** (8 * width), 2 ** (8 * width - 1)
    shares = [[clients.ring(rank, each, n, width) for rank in range(parties)] for each in counts]
    a, b, c = ([sum(column) % size for column in zip(*each, strict=True)] for each in shares)
    a_xor, b_xor, c_xor = ([reduce(int.__xor__, column) for column in zip(*each, strict=True)] for each in shares)

    def adjusted(kind, inputs, join, mask, **more):
        named = {} if kind == "AdjustAnd" else {"field_size": width}
        body = {"prg_inputs": [clients.drawn(each, n, width) for each in counts[:inputs]], **named, **more}
        code, answer = clients.ask(kind, body)
        assert code == 0, answer
        parts = integers(answer, width)
        return [join(x, y) for x, y in zip(mask, parts[:n], strict=True)], parts[n:]

    def plus(x, y):
        return (x + y) % size

    assert adjusted("AdjustMul", 3, plus, c)[0] == [x * y % size for x, y in zip(a, b, strict=True)]
    assert adjusted("AdjustSquare", 2, plus, b)[0] == [x * x % size for x in a]
    assert adjusted("AdjustTrunc", 2, plus, b, bits=bits)[0] == [((x ^ half) - half >> bits) % size for x in a]
    low, rest = adjusted("AdjustTruncPr", 3, plus, b, bits=bits)
    assert low == [x % half >> bits for x in a]
    assert [plus(x, y) for x, y in zip(c, rest, strict=True)] == [x // half for x in a]
    assert adjusted("AdjustEqz", 2, int.__xor__, b_xor)[0] == a
    assert set(adjusted("AdjustRandBit", 1, plus, a)[0]) <= {0, 1}
    products = [reduce(int.__mul__, column) % size for column in zip(*shares[0], strict=True)]
    assert adjusted("AdjustMulPriv", 2, plus, b)[0] == products
    if width == 16:
        assert adjusted("AdjustAnd", 3, int.__xor__, c_xor)[0] == [x & y for x, y in zip(a_xor, b_xor, strict=True)]


@FEW
@given(width=widths, n=st.integers(1, 40), parties=st.sampled_from([2, 3]))
def test_correlations_in_prime_fields(server, width, n, parties):
    clients, bits, counts = Clients(server, parties), {4: 31, 8: 61, 16: 127}[width], (0, 40, 80)
    prime = 2**bits - 1
    shares = [[clients.field(rank, each, n, width, bits) for rank in range(parties)] for each in counts]
    a, b, c = ([sum(column) % prime for column in zip(*each, strict=True)] for each in shares)
    body = {"prg_inputs": [clients.drawn(each, n, width) for each in counts], "field_size": width, "element_type": "GFMP"}
    for kind, mask, want in (
        ("AdjustMul", c, [x * y % prime for x, y in zip(a, b, strict=True)]),
        ("AdjustMulPriv", b, [reduce(int.__mul__, column) % prime for column in zip(*shares[0], strict=True)]),
    ):
        asked = body | {"prg_inputs": body["prg_inputs"][: 3 if kind == "AdjustMul" else 2]}
        code, answer = clients.ask(kind, asked)
        assert code == 0, answer
        assert [(x + y) % prime for x, y in zip(mask, integers(answer, width), strict=True)] == want


@FEW
@given(width=widths, n=st.integers(1, 60), rank=st.integers(0, 2))
def test_permutations(server, width, n, rank):
    clients, size = Clients(server, 3), 2 ** (8 * width)
    a, b = (
        [sum(column) % size for column in zip(*(clients.ring(each, at, n, width) for each in range(3)), strict=True)]
        for at in (0, 100)
    )
    aes = Cipher(algorithms.AES(clients.seeds[rank]), modes.CTR((200).to_bytes(16, "little"))).encryptor()
    numbers = integers(aes.update(bytes(16 * (n - 1))), 16)
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = numbers[i - 1] % (i + 1)
        order[i], order[j] = order[j], order[i]
    moved = [0] * n
    for i, place in enumerate(order):
        moved[place] = a[i]
    permuted = {"prg_count": 200, "size": n, "encrypted_seeds": clients.encrypted[rank]}
    inputs = [clients.drawn(0, n, width), clients.drawn(100, n, width)]
    code, answer = clients.ask("AdjustPerm", {"prg_inputs": inputs, "field_size": width, "perm": permuted})
    assert code == 0, answer
    assert [(x + y) % size for x, y in zip(b, integers(answer, width), strict=True)] == moved


@FEW
@given(
    width=widths, m=st.integers(1, 12), n=st.integers(1, 12), k=st.integers(1, 30), turned=st.tuples(st.booleans(), st.booleans())
)
def test_matrix_products(server, width, m, n, k, turned):
    clients, size, counts, shapes = Clients(server), 2 ** (8 * width), (0, 1000, 2000), ((m, k), (k, n), (m, n))
    masks = []
    for count, shape, turn in zip(counts, shapes, (*turned, False), strict=True):
        flat = [sum(c) % size for c in zip(*(clients.ring(r, count, shape[0] * shape[1], width) for r in (0, 1)), strict=True)]
        drawn = np.array(flat, object).reshape(shape[::-1] if turn else shape)
        masks.append(drawn.T if turn else drawn)
    inputs = [clients.drawn(count, shape[0] * shape[1], width) for count, shape in zip(counts, shapes, strict=True)]
    body = {"prg_inputs": inputs, "field_size": width, "M": m, "N": n, "K": k, "transpose_inputs": [*turned, False]}
    code, answer = clients.ask("AdjustDot", body)
    assert code == 0, answer
    got = (masks[2] + np.array(integers(answer, width), object).reshape(m, n)) % size
    assert (got == masks[0] @ masks[1] % size).all()


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("shape", [(9, 20, 300), (1, 5, 4097)])
def test_long_matrix_products_are_exact_at_extremes(width, shape):
    m, n, k = shape
    ring, largest = RINGS[width], 2 ** (8 * width) - 1

    def read(values):
        data = b"".join(int(value).to_bytes(width, "little") for value in values.ravel())
        return ring.shaped(ring.sample(Fixed(data), values.size), *values.shape)

    a, b = np.full((m, k), largest, object), np.full((k, n), largest, object)
    a[0, ::3], b[::7, 0] = 1, 2 ** (8 * width - 1)
    got = integers(bytes(ring.data(ring.matmul(read(a), read(b)))), width)
    assert got == [value % (largest + 1) for value in (a @ b).ravel()]


class Fixed:
    """A stream of given bytes."""

    def __init__(self, data):
        self.data = data

    def take(self, size):
        return np.frombuffer(self.data[:size], np.uint8)


@pytest.mark.parametrize(("width", "bits"), [(4, 31), (8, 61), (16, 127)])
def test_prime_fields_at_their_ends(width, bits):
    field, prime = FIELDS[width], 2**bits - 1
    values = [0, 1, 2, prime - 1, prime - 2, prime >> 1]
    pairs = [(x, y) for x in values for y in values]
    a, b = (np.array([[v & 2**64 - 1, v >> 64] for v in column], "<u8") for column in zip(*pairs, strict=True))
    assert integers(bytes(field.data(field.multiply(a, b))), width) == [x * y % prime for x, y in pairs]
    assert integers(bytes(field.data(field.add(a, b))), width) == [(x + y) % prime for x, y in pairs]
    assert integers(bytes(field.data(field.subtract(a, b))), width) == [(x - y) % prime for x, y in pairs]


# --- refusals ---------------------------------------------------------------------------------------------------------------


def change(body, at, value):
    """A copy with the element at a path of keys replaced."""
    copy = json.loads(json.dumps(body))
    place = copy
    for each in at[:-1]:
        place = place[each]
    place[at[-1]] = value
    return copy


def bad_requests(clients):
    """(kind, body, words of the refusal), each one step from a request that is served."""
    drawn = [clients.drawn(10 * i, 4, 8) for i in range(3)]
    mul = {"prg_inputs": drawn, "field_size": 8}
    trunc = {"prg_inputs": drawn[:2], "field_size": 8, "bits": 3}
    dot = {"prg_inputs": drawn, "field_size": 8, "M": 2, "N": 2, "K": 2, "transpose_inputs": [False] * 3}
    permuted = {"prg_count": 40, "size": 4, "encrypted_seeds": clients.encrypted[0]}
    perm = {"prg_inputs": drawn[:2], "field_size": 8, "perm": permuted}
    first = ("prg_inputs", 0)
    for kind, body in (("AdjustMul", mul), ("AdjustTrunc", trunc), ("AdjustDot", dot), ("AdjustPerm", perm)):
        yield kind, body, None
    stranger = Clients(clients.server).encrypted[0]
    yield "AdjustMul", b"{", "no AdjustMulRequest"
    yield "AdjustMul", b"\xff\xfe", "no AdjustMulRequest"
    yield "AdjustMul", {}, "takes 3 prg_inputs, not 0"
    yield "AdjustMul", change(mul, ("unknown",), 1), "unknown"
    yield "AdjustMul", change(mul, ("prg_inputs",), drawn[:2]), "takes 3 prg_inputs, not 2"
    yield "AdjustMul", change(mul, ("field_size",), 5), "field_size is 5"
    yield "AdjustMul", change(mul, (*first, "buffer_len"), 0), "buffer_len is 0"
    yield "AdjustMul", change(mul, (*first, "buffer_len"), 31), "multiple"
    yield "AdjustMul", change(mul, (*first, "buffer_len"), 64), "one size"
    yield "AdjustMul", change(mul, (*first, "buffer_len"), -8), "no AdjustMulRequest"
    yield "AdjustMul", change(mul, (*first, "prg_count"), 2**64 - 1), "beyond 64 bits"
    yield "AdjustMul", change(mul, (*first, "encrypted_seeds"), clients.encrypted[:1]), "1 parties"
    yield "AdjustMul", change(mul, ("prg_inputs", 1, "encrypted_seeds"), [*clients.encrypted, stranger]), "every party's seed"
    yield "AdjustMul", change(mul, (*first, "encrypted_seeds"), clients.encrypted[:1] * 2), "two ranks"
    yield "AdjustMul", change(mul, (*first, "encrypted_seeds", 0), "AAAA"), "not encrypted under this server's key"
    yield "AdjustMul", change(mul, ("prg_inputs", 2, "prg_count"), 11), "masks overlap"
    yield "AdjustMul", change(mul, ("prg_inputs",), [drawn[0], drawn[0], clients.drawn(2, 4, 8)]), "masks overlap"
    yield "AdjustTrunc", change(trunc, ("bits",), 64), "at most 63"
    yield "AdjustTruncPr", {**mul, "bits": 63}, "at most 62"
    yield "AdjustDot", change(dot, ("K",), 3), "M=2, N=2, K=3"
    yield "AdjustDot", change(dot, ("transpose_inputs",), [False]), "three transpose_inputs"
    yield "AdjustPerm", change(perm, ("perm", "size"), 5), "permutation of 5"
    yield "AdjustPerm", change(perm, ("perm", "encrypted_seeds"), stranger), "no rank"
    whole = [clients.drawn(2**40 * i, 2**33, 8) for i in range(2)]
    yield "AdjustPerm", change(perm, ("prg_inputs",), whole) | {"perm": {**permuted, "size": 2**33}}, "smaller pieces"


def test_bad_requests_are_refused_and_harm_nobody(server):
    clients = Clients(server)
    for kind, body, words in bad_requests(clients):
        code, text = clients.ask(kind, body)
        if words is None:
            assert code == 0, text
        else:
            assert code in (1, 2) and words in text, (kind, words, text)
    refused = server.served.refused
    good = {"prg_inputs": [clients.drawn(0, 2, 8), clients.drawn(10, 2, 8)], "field_size": 8}
    assert clients.ask("AdjustSquare", good)[0] == 0
    assert server.served.refused == refused


def test_what_is_no_request_is_refused(server):
    clients = Clients(server)
    assert clients.ask("AdjustCube", {})[0] == 404
    assert clients.ask("AdjustMul", {}, content_type="text/html")[0] == 415
    assert clients.ask("AdjustMul", bytes(1 << 21))[0] == 413
    connection = http.client.HTTPConnection(server.address)
    connection.request("GET", f"/{SERVICE}/AdjustMul")
    assert connection.getresponse().status == 404
    assert clients.ask("AdjustMul", b"\x08\xff", content_type="application/proto")[0] == 1


def test_a_client_that_leaves_stops_its_answer(server):
    clients = Clients(server)
    n = 1 << 32
    body = json.dumps({"prg_inputs": [clients.drawn(n * i, n, 8) for i in range(2)], "field_size": 8})
    connection = http.client.HTTPConnection(server.address)
    connection.request("POST", f"/{SERVICE}/AdjustSquare", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read(100)[0] == 0
    connection.close()
    deadline = time.monotonic() + 20
    before = -1.0
    while server.served.seconds > before and time.monotonic() < deadline:
        before = server.served.seconds
        time.sleep(0.3)
    assert server.served.seconds == before


def test_seeds_are_forgotten():
    opened, clock = [], [0.0]
    memory = SeedMemory(lambda encrypted: opened.append(encrypted) or encrypted[::-1], 10.0, lambda: clock[0])
    for now in (0, 5, 14):
        clock[0] = now
        memory.forget()
        assert memory.get(b"ab") == b"ba"
    assert opened == [b"ab"]
    clock[0] = 24.5
    memory.forget()
    assert len(memory) == 0
    assert memory.get(b"ab") == b"ba"
    assert len(opened) == 2


def test_the_server_forgets_a_session(key):
    with BeaverServer("127.0.0.1:0", key, idle=0.2) as server:
        clients = Clients(server)
        body = {"prg_inputs": [clients.drawn(0, 2, 8), clients.drawn(10, 2, 8)], "field_size": 8}
        assert clients.ask("AdjustSquare", body)[0] == 0
        assert server.remembered == 2
        deadline = time.monotonic() + 5
        while server.remembered and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.remembered == 0
        assert clients.ask("AdjustSquare", body)[0] == 0


def test_sessions_that_pause_and_connections_that_end(key, public_key):
    with BeaverServer("127.0.0.1:0", key, idle=0.3) as server:
        for transport in ("http", "h2"):
            config = spu_config(BeaverConfig(address=server.address, public_key=public_key, transport=transport))
            assert run(lambda i: i * i, (np.array([7]),), config, pause=0.6) == 49
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(40):
            Clients(server).ask("AdjustMul", {})
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before


# --- keys, TLS, command line ------------------------------------------------------------------------------------------------


def test_key_file(tmp_path):
    path = tmp_path / "key"
    made = load_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path).public_pem == made.public_pem
    assert load_key(tmp_path / "second").public_pem != made.public_pem
    text = path.read_text()
    path.write_text(text.replace(text.split("\n")[2], (tmp_path / "second").read_text().split("\n")[2]))
    with pytest.raises(UserError, match=r"do not belong together|not an SM2"):
        load_key(path)
    for content in (text[:80], "", made.public_pem, "-----BEGIN PRIVATE KEY-----\n@@@\n"):
        path.write_text(content)
        with pytest.raises(UserError, match="not an SM2 private key"):
            load_key(path)
    with pytest.raises(UserError, match="cannot be read or made"):
        load_key(tmp_path)


def test_mutual_tls(key, public_key, tmp_path):
    make_certificates(tmp_path / "right")
    make_certificates(tmp_path / "other")
    x = np.array([2, 3])
    with BeaverServer("127.0.0.1:0", key, Identity(tmp_path / "right", "dealer")) as server:
        for transport in ("http", "h2"):
            beaver = BeaverConfig(address=server.address, public_key=public_key, transport=transport)
            config = spu_config(beaver, identity=Identity(tmp_path / "right", "client"))
            assert (run(lambda x: x * x, (x,), config) == x * x).all()
        context = ssl.create_default_context(cafile=str(tmp_path / "right" / "ca.pem"))
        port = int(server.address.split(":")[1])
        connection = http.client.HTTPSConnection("localhost", port, context=context)  # shows no certificate
        with pytest.raises((ssl.SSLError, ConnectionError)):
            connection.request("GET", "/")
            connection.getresponse()
        served = sum(server.served.requests.values())
        with pytest.raises(RuntimeError, match="SSL"):
            run(lambda x: x * x, (x,), spu_config(beaver, identity=Identity(tmp_path / "other", "client")), wait_ms=SOON_MS)
        assert sum(server.served.requests.values()) == served


def test_addresses_and_ranks_that_cannot_be(server, key, public_key, tmp_path):
    for address in (server.address, "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "no.such.host.invalid:0"):
        with pytest.raises(UserError, match="host:port"):
            BeaverServer(address, key)
    for rank in (-1, 2):
        with pytest.raises(UserError, match=f"adjust_rank is {rank}; 2 parties have ranks 0 to 1"):
            spu_config(BeaverConfig(address=server.address, public_key=public_key, adjust_rank=rank))
    with pytest.raises(UserError, match="name the file that the server wrote"):
        spu_config(BeaverConfig(address=server.address, public_key=tmp_path / "none"))


def test_command(tmp_path):
    """A process of its own: it serves SPU, and says at its end what it did."""
    code = "from spu_llm.cli.beaver import beaver_command; beaver_command()"
    arguments = ["--listen", "127.0.0.1:0", "--key", "b.key", "--public-key", "b.pub"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(30, process.kill)
    killer.start()
    try:
        address = re.fullmatch(r"serving at (\S+), public key in b.pub:\n", process.stdout.readline()).group(1)
        beaver = BeaverConfig(address=address, public_key=tmp_path / "b.pub", transport="h2")
        assert run(lambda i: i * i, (np.array([5]),), spu_config(beaver)) == 25
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 0
        assert (tmp_path / "b.pub").read_text() in rest
        assert "requests served, 0 refused" in rest
    finally:
        killer.cancel()
        process.kill()


def test_command_help():
    shown = CliRunner().invoke(beaver_command, ["--help"]).output
    assert "spu-llm beaver --listen" in shown
