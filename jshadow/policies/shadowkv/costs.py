"""The costs of ShadowKV: the bytes of a prompt's chunks, and what a decode step reads and computes."""

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.ops.packing import ROW_BITS, scale_dtype
from jshadow.policies.mesh_checks import no_kernel
from jshadow.policies.shadowkv.key_codecs import Sizes
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, pass_launches
from jshadow.policies.shadowkv.landmarks import mean_kind
from jshadow.policies.shadowkv.link_costs import asked_bytes, left_reads, near_chunks
from jshadow.policies.shadowkv.selection import has_kernel
from pallas_kernels.products import CACHED_ROWS

if TYPE_CHECKING:
    from jshadow.policies.shadowkv.settings import ShadowSettings


REST_LAUNCHES = 60  # kernels of a compression outside its loops
SECTOR = 32  # bytes that a GPU reads at least at once, from its own memory and from host memory


def sizes_of(spec: CacheSpec) -> Sizes:
    """Return the sizes of a layer in the form that a codec needs."""
    return Sizes(spec.kv_heads, spec.head_dim, spec.dtype)


def itemsize(spec: CacheSpec) -> int:
    """Return the number of bytes of a number in the model's dtype."""
    return jnp.dtype(spec.dtype).itemsize


# Stored arrays


def landmark_row_bytes(rows: int, kind: str, sizes: Sizes) -> int:
    """Return the bytes of `rows` landmarks of the width of a head, stored as `kind` ("model", "int8" or "int4")."""
    if kind == "model":
        return rows * sizes.dim * jnp.dtype(sizes.dtype).itemsize
    return rows * (sizes.dim * ROW_BITS[kind] // 8 + jnp.dtype(scale_dtype(sizes.dtype)).itemsize)


def landmark_bytes(policy: "ShadowSettings", chunks: int, sizes: Sizes) -> int:
    """Return the bytes of the landmarks of `chunks` chunks, with their scales."""
    rows, kind = chunks * sizes.heads, policy.landmarks.dtype
    if policy.landmarks.levels == 1:
        return landmark_row_bytes(rows * policy.landmark_parts, kind, sizes)
    details = landmark_row_bytes(rows * (policy.landmark_parts - 1), kind, sizes)
    return landmark_row_bytes(rows, mean_kind(kind), sizes) + details


def spread_bytes(policy: "ShadowSettings", chunks: int, sizes: Sizes) -> int:
    """Return the bytes of the spreads of `chunks` chunks."""
    if policy.landmarks.order == 1:
        return 0
    each = policy.landmark_parts + (policy.landmarks.levels == 2)
    return chunks * sizes.heads * each * jnp.dtype(scale_dtype(sizes.dtype)).itemsize


def compress_bytes(policy: "ShadowSettings", spec: CacheSpec, tokens: int) -> int:
    """Return the bytes of the temporaries of `compress`.

    The codec needs temporaries when it encodes, or when it measures errors to choose outliers. Landmarks and values
    that are packed also exist before they are packed.
    """
    sizes, item = sizes_of(spec), itemsize(spec)
    coded, own = coded_sizes(policy, spec, tokens)
    total = policy.codec.encode_bytes(coded, own, min(own, BLOCK))
    if policy.choice.outlier_rule != "landmark":
        total = max(total, policy.codec.losses_bytes(coded, min(own, BLOCK)))
    if own < tokens:  # the exchanged keys: all tokens padded, and this device's part before and after
        total += (tokens * sizes.columns + 2 * own * coded.columns) * item
    if policy.landmarks.dtype != "model" or policy.landmark_parts > 1:
        total += 2 * policy.max_chunks(spec.capacity) * policy.landmark_parts * sizes.columns * (item + 4)
    if policy.values.dtype != "model":
        total += max(tokens, spec.capacity) * sizes.columns * (item + 4)
    return spec.batch * total


def compress_flops(policy: "ShadowSettings", spec: CacheSpec, tokens: int) -> int:
    """Return the operations of the matrix products of `compress`: the code, and the keys rebuilt to choose outliers."""
    sizes, own = coded_sizes(policy, spec, tokens)
    total = policy.codec.encode_flops(sizes, own)
    if policy.landmark_outliers(spec.capacity) < policy.max_outliers(spec.capacity):
        total += 2 * own * sizes.columns * policy.codec.products(sizes)
    return spec.batch * total


def compress_launches(policy: "ShadowSettings", spec: CacheSpec, tokens: int) -> int:
    """Return about how many kernels `compress` launches: the code, passes over the prompt, and REST_LAUNCHES others.

    The passes are for landmarks, for their spread, and for the errors of rebuilt keys.
    """
    sizes, own = coded_sizes(policy, spec, tokens)
    passes = 1 + (policy.landmarks.order == 2)
    passes += policy.landmark_outliers(spec.capacity) < policy.max_outliers(spec.capacity)
    return policy.codec.encode_launches(sizes, own) + pass_launches(passes, tokens) + REST_LAUNCHES


def coded_sizes(policy: "ShadowSettings", spec: CacheSpec, tokens: int) -> tuple[Sizes, int]:
    """Return the sizes of the keys that a device codes, and of how many of a prompt's tokens.

    On a mesh, a device codes all heads of its tokens if the code is joint.
    """
    sizes, shards = sizes_of(spec), spec.shards
    if shards is None or not policy.codec.joint:
        return sizes, tokens
    return sizes._replace(heads=sizes.heads * shards.tp), -(-tokens // shards.tp)


# A decode step


def tiers(policy: "ShadowSettings", spec: CacheSpec) -> tuple[HostLayout, int]:
    """Return the layout of the host tier, and how many of its two parts (prompt and tail) are not empty."""
    layout = policy.host_layout(spec)
    assert layout is not None
    return layout, bool(layout.units) + bool(layout.tail_units)


def selected_numbers(policy: "ShadowSettings", spec: CacheSpec, width: int) -> int:
    """Return `width` times the number of selected tokens, summed over rows and KV heads.

    The result is doubled if there is a tail, because the device gathers each row from both parts. A row is moved from
    the host only once.
    """
    _, halves = tiers(policy, spec)
    return halves * spec.batch * spec.kv_heads * policy.selected(spec) * policy.chunk_size * width


def step_bytes(
    policy: "ShadowSettings", spec: CacheSpec, state: LayerState, usual: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the bytes of each part that a step reads.

    Only the selected left rows and values are read, and all of the other parts.

    Args:
        policy: the policy.
        spec: the layer.
        state: its state, which may be abstract.
        usual: the bytes of each part if all of it was read.

    Returns:
        For each part, the bytes read from device memory and the bytes moved from the host.
    """
    layout, halves = tiers(policy, spec)
    once = spec.batch * spec.kv_heads * policy.selected(spec) * unit_bytes(spec, layout)
    offloaded = any(tier is not None and tier.memory != "device" for tier in (state.host.prompt, state.host.tail))
    # The rows that are kept on the device are read in the place of fetched rows; `step_passes` counts both.
    parts = {part: size for part, size in usual.items() if part not in ("host rows", "host tail", "keys")}
    parts["landmarks"] = (landmark_reads(policy, spec)[1], 0)
    if policy.landmarks.order == 2:
        parts["spread"] = (spread_reads(policy, spec), 0)
    left = policy.choice.rebuilt * left_reads(policy, spec)
    return parts | {"left": (left, 0), "values": (0, once) if offloaded else (halves * once, 0)}


def step_passes(policy: "ShadowSettings", spec: CacheSpec) -> dict[str, tuple[int, int]]:
    """Return the bytes that the kernels of a step move beyond those of `step_bytes`, in the same form.

    - "scores": each query head's mass or logit of every chunk, and the score of every chunk, in float32. Each is
      written once and read once. The masks and the softmax statistics are left out, as they take less than 1 % of this.
    - "selected": the rebuilt keys and the values of the selected chunks. Each is written once and read once.
    - "padding": the rest of the sectors in which the rows of the selected chunks lie.
    - "left rows": on a mesh, the array in which the left rows of all heads' chunks reach their devices. It is written
      and read once, and so is the part of it that a device gets.
    """
    layout, _ = tiers(policy, spec)
    count, chunks = policy.selected(spec), layout.units + layout.tail_units
    scores = 2 * 4 * spec.batch * (spec.q_heads + spec.kv_heads) * chunks
    one = spec.batch * spec.kv_heads * count * policy.chunk_size * spec.head_dim * itemsize(spec)
    left = policy.chunk_size * policy.codec.read_bytes(sizes_of(spec))
    rows = spec.batch * spec.kv_heads * count
    beside_left, beside_values = (rows * beside(size) for size in (left, unit_bytes(spec, layout)))
    by_kernel = spec.fetch != "device_put"  # the host gathers rows without what lies beside them
    on_device, on_host = (beside_values, 0) if spec.fetch == "resident" else (0, beside_values * by_kernel)
    asked = asked_bytes(policy, spec)
    return {
        "left rows": (2 * (asked + asked // spec.shards.tp) if spec.shards and asked else 0, 0),
        "scores": (scores if count else 0, 0),
        "selected": (2 * (policy.choice.rebuilt + 1) * one, 0),
        "padding": (policy.choice.rebuilt * beside_left + on_device, on_host),
    }


def step_kept(policy: "ShadowSettings", spec: CacheSpec) -> dict[str, tuple[int, int]]:
    """Return the bytes that a step saves if all selected chunks stay: they are neither read, written nor moved."""
    layout, halves = tiers(policy, spec)
    if not spec.keep or layout.no_kernel or no_kernel(spec):
        return {}
    rows = spec.batch * spec.kv_heads * policy.selected(spec)
    unit, left = unit_bytes(spec, layout), policy.chunk_size * policy.codec.read_bytes(sizes_of(spec))
    written = 2 * rows * policy.chunk_size * spec.head_dim * itemsize(spec)
    saved = {"left": (left_reads(policy, spec), 0), "selected": (written, 0), "padding": (rows * beside(left), 0)}
    if spec.fetch == "resident":
        saved["padding"] = (rows * (beside(left) + beside(unit)), 0)
        return saved | {"values": (halves * rows * unit, 0)}
    return saved | {"values": (0, rows * unit), "padding": (rows * beside(left), rows * beside(unit))}


def beside(row: int) -> int:
    """Return the mean bytes that are read beside a row of `row` bytes because whole sectors are read.

    Rows lie one after the other, so a row begins at any multiple of the greatest common divisor of both sizes.
    """
    return SECTOR - math.gcd(row, SECTOR) if row else 0


def step_flops(policy: "ShadowSettings", spec: CacheSpec, usual: int) -> int:
    """Return the operations of a step: those of `usual`, the rebuilding of the selected keys, and their scores.

    Packed numbers are counted as if they were unpacked. `usual` is the default estimate from the bytes read.
    """
    rebuilt = policy.choice.rebuilt * selected_numbers(policy, spec, spec.head_dim)
    packed = packed_landmarks(policy, spec)
    if policy.values.dtype != "model":
        layout, halves = tiers(policy, spec)
        rows = halves * spec.batch * spec.kv_heads * policy.selected(spec)
        packed += rows * (policy.chunk_size * spec.head_dim - unit_bytes(spec, layout) // itemsize(spec))
    rebuilding = 2 * rebuilt * (policy.codec.products(sizes_of(spec)) + spec.group)
    return usual + rebuilding + 2 * spec.group * packed


def packed_landmarks(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return how many more landmark numbers a step reads because they are packed.

    The comparison is with numbers of the model's dtype that take the same bytes.
    """
    if policy.landmarks.dtype == "model":
        return 0
    numbers, size = landmark_reads(policy, spec)
    return numbers - size // itemsize(spec)


def landmark_reads(policy: "ShadowSettings", spec: CacheSpec) -> tuple[int, int]:
    """Return how many numbers and how many bytes of landmarks a step reads.

    With one level, it reads all landmarks. With two levels, it reads the means of all chunks, and both levels of a few
    chunks, which it gathers from each part of the tier.
    """
    (layout, halves), sizes = tiers(policy, spec), sizes_of(spec)
    chunks, row = layout.units + layout.tail_units, spec.kv_heads * spec.head_dim
    if policy.landmarks.levels == 1:
        return spec.batch * chunks * policy.landmark_parts * row, spec.batch * landmark_bytes(policy, chunks, sizes)
    near = halves * near_chunks(policy, spec)
    means = landmark_row_bytes(chunks * spec.kv_heads, mean_kind(policy.landmarks.dtype), sizes)
    numbers = (chunks + near * policy.landmark_parts) * row
    return spec.batch * numbers, spec.batch * (means + landmark_bytes(policy, near, sizes))


def spread_reads(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the bytes of spreads that a step reads. The same chunks are read as for landmarks."""
    (layout, halves), sizes = tiers(policy, spec), sizes_of(spec)
    chunks = layout.units + layout.tail_units
    if policy.landmarks.levels == 1:
        return spec.batch * spread_bytes(policy, chunks, sizes)
    near = halves * near_chunks(policy, spec) * policy.landmark_parts
    return spec.batch * spec.kv_heads * (chunks + near) * jnp.dtype(scale_dtype(spec.dtype)).itemsize


def step_temporaries(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the bytes of a step's temporaries.

    These are the scores and the sorting of all chunks, the places of the selected chunks, their rows, and the scores of
    tokens. Selected keys are float32 until they are rotated. Selected values exist twice: as fetched, and as attended
    to.
    """
    (layout, halves), parts = tiers(policy, spec), policy.read_parts
    item, chunks = itemsize(spec), layout.units + layout.tail_units
    scores = spec.batch * chunks * 4 * (3 * spec.q_heads * parts + 4 * spec.kv_heads)
    if parts > 1:  # the sums of a chunk's landmarks
        scores += spec.batch * chunks * 4 * spec.q_heads
    if policy.landmarks.dtype != "model":
        rows = spec.batch * chunks * parts * spec.kv_heads
        # On a GPU the kernel unpacks into registers. On a CPU `pallas_kernels` unpacks one block at a time.
        if has_kernel(policy.scoring(spec), joined=layout.tail_units > 0):
            rows = min(rows, 2 * CACHED_ROWS)
        scores += rows * spec.head_dim * (4 + item)
    if policy.landmarks.levels == 2:
        near = spec.batch * near_chunks(policy, spec) * policy.landmark_parts
        scores += near * (spec.kv_heads * spec.head_dim * (halves + 4 + item) + 4 * 4 * spec.q_heads)
    expanded = max(codec.expand_bytes(sizes_of(spec)) for codec in (policy.codec, policy.later_codec))
    selected = expanded + spec.head_dim * (2 * 4 + 3 * item)
    if policy.values.dtype != "model":
        selected += spec.head_dim * (1 + 4)
    count = policy.selected(spec)
    # `pallas_kernels.select_chunks` sorts and searches the selected chunks, and the places of the cache.
    places = 8 * 4 * spec.batch * spec.kv_heads * (count + policy.places(spec))
    # Each device makes the rows that all heads ask for. A reduce-scatter may copy them.
    asked = 2 * asked_bytes(policy, spec)
    attended = asked + exact_scores(policy, spec) + selected_numbers(policy, spec, 3 * 4 * spec.group) // halves
    return scores + policy.choice.rebuilt * selected_numbers(policy, spec, selected) + places + attended


def exact_scores(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the bytes of the scores, masked scores and weights of the window and the outliers in a step."""
    exact = spec.window + policy.max_outliers(spec.capacity) * policy.chunk_size
    return 3 * 4 * spec.batch * spec.q_heads * exact
