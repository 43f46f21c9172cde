"""The compression of a prompt in one layer: its operations and predicted time, compared with the rest of the layer.

The operations are those of the compiled program, each loop as often as it runs. The launches of its kernels are counted
in the same way. XLA calls cuSOLVER and cuBLAS for the Cholesky factors and the triangular solves of the basis. These
calls take most of the time. The compiler here has no cuSOLVER, so the program is compiled with a copy instead of the
factor. Operations of both calls are counted from their shapes, at the rate LIBRARY.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from aot.compiler import SHAPE, SIZES, Instruction, Program, compile_for, place
from aot.launches import computations, operands_of, traffic
from aot.models import LLAMA, ONE_LAYER
from aot.targets import TARGETS
from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.prefill.layer import compress_layer
from jshadow.planner.bytes import on_backend
from jshadow.planner.gpu_specs import GPUS
from jshadow.planner.machine import abstract_state
from jshadow.planner.prefill_time import layer_operations
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.shadowkv.key_codecs.lowrank import COLUMNS_A_LAUNCH

TOKENS = 122_880
POLICIES = {"paper": ShadowKV(), "packed": ShadowKV.packed(), "packed small": ShadowKV.packed(small=True)}
# Maximum operations of the compression, in those of the layer.
SHARES = {"paper": 0.015, "packed": 0.02, "packed small": 0.02}
ESTIMATE = 0.05  # maximum relative error of the operations of `compress_work`
LAUNCHES = 0.15  # maximum relative error of the launches of `compress_work`
MOST_LAUNCHES = 3500  # of a prompt of TOKENS tokens, with what library calls count as
SECONDS = 0.03  # maximum predicted time of the compression, in that of the layer
# Operations a second of library calls: those of eigh of width 1,024 on a V100, 9 * 1024^3 in 56 ms (jax issue 10180).
# The factors and solves have more operations in large products than eigenvectors have, so this rate is low for them.
LIBRARY = 9 * 1024**3 / 56e-3
NO_WORK = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
}


class Work(NamedTuple):
    """What a compiled compression does.

    Attributes:
        products: operations of matrix products, each with the dtype of its operands, its HLO name, and how often it
            runs.
        library: operations of library calls.
        kernels: number of its kernels and copies.
        calls: number of its library calls: Cholesky factors and triangular solves.
        columns: number of columns of all Cholesky factors.
        bytes: bytes that its kernels move.
        seconds: predicted seconds. A kernel takes the longer of its operations and its bytes.
        scalar: names of the kernels that multiply matrices without instructions of tensor cores.
        temporary_bytes: device bytes of its temporaries.
    """

    products: list[tuple[int, str, str, int]]
    library: float
    kernels: int
    calls: int
    columns: int
    bytes: int
    seconds: float
    scalar: list[str]
    temporary_bytes: int

    @property
    def operations(self) -> float:
        """Number of all operations."""
        return sum(count * runs for count, _, _, runs in self.products) + self.library

    @property
    def launches(self) -> int:
        """Number of launches. COLUMNS_A_LAUNCH columns of library calls count as one."""
        return self.kernels + self.columns // COLUMNS_A_LAUNCH


def one_layer(policy: Policy) -> CacheSpec:
    """Return the cache of a layer for a prompt of TOKENS tokens."""
    state = abstract_state(
        ONE_LAYER, policy, batch=1, capacity=TOKENS + 64, prompt=TOKENS, dtype="bfloat16", fetch="device_put"
    )
    return dataclasses.replace(on_backend(state.specs, "gpu")[0], layer=None)


def compile_compression(gpu: str, spec: CacheSpec) -> Program:
    """Compile `compress_layer` for a prompt of TOKENS tokens."""
    rows = Shape((1, TOKENS, LLAMA.kv_heads, LLAMA.head_dim), jnp.bfloat16)
    tail, queries = spec.policy.reads.last_queries, (LLAMA.q_heads, LLAMA.head_dim)
    prompt = PromptKV(
        k_pre=rows,
        k_post=rows,
        v=rows,
        lengths=Shape((1,), jnp.int32),
        positions=Shape((1, TOKENS), jnp.int32),
        q_tail=Shape((1, tail, *queries), jnp.bfloat16) if tail else None,
    )
    function = functools.partial(compress_layer.__wrapped__, fitted=None, spec=spec)
    with mock.patch.object(jnp.linalg, "cholesky", lambda x, symmetrize_input: jnp.tril(x)):
        return compile_for(gpu, function, place(prompt))


def numbers(text: str) -> list[int]:
    """Return the dimensions of the first array type in a text."""
    found = SHAPE.search(text)
    assert found is not None, text
    return [int(n) for n in found[2].split(",") if n]


def product_of(dot: Instruction, inside: Mapping[str, Instruction]) -> tuple[int, str]:
    """Return the operations of a dot, 2 * m * n * k, and the dtype of its wider operand.

    A float32 dot in six bfloat16 products has six times the operations, in bfloat16.
    """
    operands = [inside[name].result for name in operands_of(dot)]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.line)
    assert contracted is not None, dot.line
    shape = numbers(operands[0])
    summed = math.prod(shape[int(axis)] for axis in contracted[1].split(","))
    kinds = [SHAPE.search(operand)[1] for operand in operands]  # type: ignore[index]
    operations = 2 * dot.result_numbers * summed
    if "algorithm=dot_bf16_bf16_f32_x6" in dot.line:
        return 6 * operations, "bf16"
    return operations, max(kinds, key=SIZES.__getitem__)


def scalar_products(program: Program) -> list[str]:
    """Return the names of the kernels of matrix products that have no `mma` or `wgmma` in their assembly.

    Raises AssertionError if the assembly has no kernel of a matrix product.
    """
    kernels = {name: text for text in program.modules for name in re.findall(r"\.entry (\w*dot\w*)", text)}
    assert kernels, "no kernel of a matrix product"
    return [name for name, text in kernels.items() if "mma." not in text]


def work_of(program: Program, gpu: str) -> Work:
    """Count the work of a compiled compression."""
    flops, bandwidth = GPUS[gpu].flops, TARGETS[gpu].bandwidth
    bodies = computations(program.text)
    start = re.search(r"\nENTRY %?([\w.-]+)", program.text)
    assert start is not None
    work: dict[str, Any] = {"products": [], "library": 0.0, "seconds": 0.0}
    work |= dict.fromkeys(("kernels", "calls", "columns", "bytes"), 0)

    def called(instruction: Instruction, key: str) -> str | None:
        found = re.search(rf"{key}=%?([\w.-]+)", instruction.line)
        return found[1] if found else None

    def visit(name: str, runs: int) -> None:
        own = {one.name: one for one in bodies[name]}
        for one in bodies[name]:
            if one.operation == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.line)
                body = called(one, "body")
                assert body is not None
                # The number of attempts at a basis is not known when the program is compiled. One is the rule.
                visit(body, runs * (int(trips[1]) if trips else 1))
            elif one.operation == "call":
                visit(called(one, "to_apply") or "", runs)
            if one.operation in NO_WORK:
                continue
            dots = [one] if one.operation == "dot" else []
            held = own
            if one.operation == "fusion" and (inner := called(one, "calls")):
                held = {each.name: each for each in bodies[inner]}
                dots = [each for each in bodies[inner] if each.operation == "dot"]
            found = [(*product_of(dot, held), dot.name) for dot in dots]
            moved = traffic(one, own, bodies, {})[0]
            if "triangularSolve" in one.line:
                _, rows, columns = numbers(one.result)
                operations = rows * columns**2 + columns**3 / 3  # the solve, and the Cholesky factor before it
                work["library"] += runs * operations
                work["calls"] += 2 * runs
                work["columns"] += columns * runs
                work["seconds"] += runs * operations / LIBRARY
            else:
                work["kernels"] += runs
            computed = sum(count / (flops if kind == "bf16" else flops / 16) for count, kind, _ in found)
            work["products"] += [(count, kind, each, runs) for count, kind, each in found]
            work["bytes"] += runs * moved
            work["seconds"] += runs * max(computed, moved / bandwidth)

    visit(start[1], 1)
    return Work(**work, scalar=scalar_products(program), temporary_bytes=program.memory.temp_size_in_bytes)


def compression_faults(name: str, gpu: str, spec: CacheSpec, work: Work) -> Iterator[str]:
    """Yield one line for each limit that a compression exceeds, and for each estimate that it contradicts."""
    (estimate, predicted), bound = spec.policy.compress_work(spec, TOKENS), spec.policy.compress_bytes(spec, TOKENS)
    if abs(estimate - work.operations) > ESTIMATE * work.operations:
        yield f"{work.operations:.3g} operations, but `compress_work` says {estimate:.3g}"
    if work.temporary_bytes > bound:
        yield f"{work.temporary_bytes} bytes of temporaries, but `compress_bytes` says at most {bound}"
    if abs(predicted - work.launches) > LAUNCHES * work.launches:
        yield f"{work.launches} launches, but `compress_work` says {predicted}"
    if work.launches > MOST_LAUNCHES:
        yield f"{work.launches} launches, of at most {MOST_LAUNCHES}"
    layer = layer_operations(LLAMA, None, TOKENS)
    if work.operations > SHARES[name] * layer:
        yield f"{work.operations / layer:.2%} of the layer's operations, of at most {SHARES[name]:.1%}"
    for count, kind, each, _ in work.products:
        if kind != "bf16":
            yield f"{each} has {count / 1e6:.1f} * 10^6 operations in {kind}, without tensor cores"
    yield from (f"the kernel {each} multiplies matrices without tensor cores" for each in work.scalar)
    limit = SECONDS * layer / GPUS[gpu].flops
    if work.seconds > limit:
        yield f"predicted {1e3 * work.seconds:.2f} ms, of at most {1e3 * limit:.2f} ms"


def compressions(gpu: str) -> Iterator[tuple[str, Work, list[str]]]:
    """Compile the compression of each of POLICIES. Yield its name, its work and the limits that it exceeds."""
    for name, policy in POLICIES.items():
        spec = one_layer(policy)
        work = work_of(compile_compression(gpu, spec), gpu)
        yield name, work, list(compression_faults(name, gpu, spec, work))
