"""The costs of ShadowKV as hooks that the planner calls. costs.py computes them."""

from typing import Any

from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.policies.costs import Costs
from jshadow.policies.links import Links
from jshadow.policies.shadowkv import costs
from jshadow.policies.shadowkv.link_costs import step_links


class ShadowCosts(Costs):
    """The costs of a layer. The class that inherits these hooks is a `ShadowSettings`."""

    @property
    def mine(self) -> Any:
        """This policy, as `costs` needs it."""
        return self

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the temporaries of the codec, and of landmarks and values that are packed."""
        return costs.compress_bytes(self.mine, spec, tokens)

    def compress_flops(self, spec: CacheSpec, tokens: int) -> int:
        """Count the matrix products of the codec, on a GPU."""
        return costs.compress_flops(self.mine, spec, tokens)

    def compress_launches(self, spec: CacheSpec, tokens: int) -> int:
        """Count the kernels of the codec and of the landmarks."""
        return costs.compress_launches(self.mine, spec, tokens)

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Count only the selected left rows and values as read, and all of the other arrays on the device."""
        return costs.step_bytes(self.mine, spec, state, super().step_bytes(spec, state))

    def step_passes(self, spec: CacheSpec) -> dict[str, tuple[int, int]]:
        """Count the scores of chunks, the selected keys and values, and what is read beside their rows."""
        return costs.step_passes(self.mine, spec)

    def step_kept(self, spec: CacheSpec) -> dict[str, tuple[int, int]]:
        """Count what chunks save that stay on the device."""
        return costs.step_kept(self.mine, spec)

    def step_links(self, spec: CacheSpec) -> Links:
        """Count the left rows."""
        return step_links(self.mine, spec)

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Count the default, the rebuilding of the selected keys, and their scores."""
        return costs.step_flops(self.mine, spec, super().step_flops(spec, state))

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores of chunks, their places, the selected rows, and the scores of tokens."""
        return costs.step_temporaries(self.mine, spec)

    def query_temporaries(self, spec: CacheSpec) -> int:
        """Count what `step_temporaries` counts, without the scores of exact tokens."""
        return costs.step_temporaries(self.mine, spec) - costs.exact_scores(self.mine, spec)
