"""How many chunks ShadowKV stores and selects on one device. On a mesh, a device has a part of them."""

import abc
import math

from jshadow.cache.spec import CacheSpec
from jshadow.policies.base import LayerCache
from jshadow.policies.parts import each_of
from jshadow.policies.shadowkv.key_codecs import KeyCodec
from jshadow.policies.shadowkv.key_codecs.split import Parts
from jshadow.policies.shadowkv.landmark_levels import GROUP
from jshadow.policies.shadowkv.reference import Quirks


class DeviceCounts(LayerCache):
    """The counts of one device. The settings of ShadowKV decide those of all devices together."""

    chunk_size: int
    quirks: Quirks

    @property
    @abc.abstractmethod
    def codec(self) -> KeyCodec:
        """The codec of the keys."""

    @abc.abstractmethod
    def max_chunks(self, capacity: int) -> int:
        """Return the number of chunks n of the longest prompt that fits."""

    @abc.abstractmethod
    def max_selected(self, capacity: int) -> int:
        """Return the number of chunks k that a query selects from the longest prompt that fits."""

    @abc.abstractmethod
    def max_places(self, capacity: int) -> int:
        """Return the number of places P in the cache of recently selected chunks, for each KV head."""

    def stored_chunks(self, spec: CacheSpec) -> int:
        """Return the number of chunks of the longest prompt whose landmarks and values a device stores.

        With a split prompt, it also counts the chunks of the window, and is a multiple of what levels and left rows
        need.
        """
        shards = spec.shards
        if shards is None or shards.sp == 1:
            return self.max_chunks(spec.capacity)
        return shards.units(spec.capacity // self.chunk_size + 1, math.lcm(GROUP, shards.tp))

    def left_chunks(self, spec: CacheSpec) -> int:
        """Return the number of chunks whose left rows a device stores."""
        shards = spec.shards
        if shards is None or not self.codec.joint:
            return self.stored_chunks(spec)
        if shards.sp > 1:
            return shards.left_units(self.stored_chunks(spec))
        every = spec.capacity // self.chunk_size + 1 if shards.splits_left else self.max_chunks(spec.capacity)
        return shards.left_units(every)

    def key_parts(self, spec: CacheSpec) -> Parts | None:
        """Return the part of the key code that a device of a mesh has, or None if it has the whole code."""
        shards = spec.shards
        if shards is None or not (shards.sp > 1 or self.splits_left(spec)):
            return None
        return Parts(shards, self.stored_chunks(spec), self.left_chunks(spec), self.chunk_size)

    @property
    def splits_tokens(self) -> bool:
        """Whether the chunks of a prompt can be split. Preloaded keys cannot."""
        return not self.quirks.exact_preload

    def splits_left(self, spec: CacheSpec) -> bool:
        """Return whether the devices of `tp` each have the left rows of some chunks."""
        return spec.shards is not None and spec.shards.splits_left and self.codec.joint

    def selected(self, spec: CacheSpec) -> int:
        """Return the number of chunks that a query can select on a device."""
        return each_of(spec, min(self.max_selected(spec.capacity), self.stored_chunks(spec)))

    def places(self, spec: CacheSpec) -> int:
        """Return the number of places of the cache of recently selected chunks on a device."""
        return max(self.selected(spec), each_of(spec, min(self.max_places(spec.capacity), self.stored_chunks(spec))))
