"""The left rows that a decode step of ShadowKV reads, and what the devices of a mesh exchange in it.

B rows, T queries, h_q and h_kv heads of a device, k chunks that a query selects on a device.
"""

from typing import TYPE_CHECKING

from jshadow.cache.spec import CacheSpec
from jshadow.policies.links import Links, gathered, reduced
from jshadow.policies.shadowkv.key_codecs import Sizes
from jshadow.policies.shadowkv.landmarks import GROUP

if TYPE_CHECKING:
    from jshadow.policies.shadowkv.settings import ShadowSettings


def later_chunks(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the number of chunks after the prompt for which there is space. Only ShadowKV+ has any."""
    layout = policy.host_layout(spec)
    return 0 if layout is None else layout.tail_units


def near_chunks(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the maximum number of a device's chunks whose second level of landmarks a step reads."""
    named = policy.max_selected(spec.capacity) * policy.choice.wider
    groups = -(-policy.max_chunks(spec.capacity) // GROUP) - -later_chunks(policy, spec) // GROUP
    return GROUP * min(named, groups)


def left_reads(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the bytes of the left rows of the selected tokens, summed over rows and KV heads.

    If there is a tail, a row of each part is read for every token.
    """
    layout, sizes = policy.host_layout(spec), Sizes(spec.kv_heads, spec.head_dim, spec.dtype)
    assert layout is not None
    each = bool(layout.units) * policy.codec.read_bytes(sizes)
    each += bool(layout.tail_units) * policy.later_codec.read_bytes(sizes)
    return spec.batch * spec.kv_heads * policy.selected(spec) * policy.chunk_size * each


def asked_rows(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return for how many chunks all heads of `tp` ask for left rows, which another device may have. 0: it never has.

    Every device makes an array with a place for each of them, and one reduce-scatter brings every head its rows.
    """
    if spec.shards is None or not policy.splits_left(spec):
        return 0
    heads = spec.batch * spec.kv_heads * spec.shards.tp
    joined = later_chunks(policy, spec) > 0 and policy.choice.outlier_rule != "landmark"  # its coding error is measured
    joined = joined and policy.later_codec.joint
    return heads * (policy.selected(spec) * policy.choice.rebuilt + joined)


def asked_bytes(policy: "ShadowSettings", spec: CacheSpec) -> int:
    """Return the bytes of the array of `asked_rows` on each device."""
    sizes = Sizes(spec.kv_heads, spec.head_dim, spec.dtype)
    return asked_rows(policy, spec) * policy.chunk_size * policy.codec.read_bytes(sizes)


def step_links(policy: "ShadowSettings", spec: CacheSpec) -> Links:
    """Return the bytes that a device sends in a step.

    - "left rows": the ids int32 [B, h_kv, k] of the chunks that each head selects, and their left rows.
    - "later rows": the sums from which the left rows of new tokens are made, float32 [B, rank] (ShadowKV+ with
      later_keys="projected").
    """
    shards, links = spec.shards, Links()
    if shards is None:
        return links
    if rows := asked_rows(policy, spec):
        sent = gathered(4 * rows, shards.tp) + gathered(asked_bytes(policy, spec), shards.tp)
        links["left rows"] = sent
    if later_chunks(policy, spec) and shards.tp > 1 and policy.later_codec.joint:
        columns = policy.codec.products(Sizes(spec.kv_heads, spec.head_dim, spec.dtype))
        links["later rows"] = reduced(4 * spec.batch * columns, shards.tp)
    return links
