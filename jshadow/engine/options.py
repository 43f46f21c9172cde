"""The options of a generation, and the capacity and fetch mode that follow from them."""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from jshadow.cache.offload import check_fetch
from jshadow.cache.state import KVState
from jshadow.engine.checks import check_capacity, check_sampling
from jshadow.engine.sampling import Sampler
from jshadow.engine.speculation.drafter import Drafter
from jshadow.engine.types import Fitted, Progress
from jshadow.errors import CapacityError, ConfigError, StateMismatch, check_integer
from jshadow.ops.buckets import round_up, step_of
from jshadow.planner.bytes import Workload
from jshadow.policies import Policy
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params


def length_step(tokens: int) -> int:
    """Return the step for rounding up a length of `tokens`: 64 for up to 2,048, 128 for up to 4,096, and so on."""
    return step_of(tokens, share=32, least=64)


def workload_of(lengths: Sequence[int], capacity: int, dtype: str) -> Workload:
    """Return the sizes of a batch of prompts. Lengths are rounded, so that similar prompts share compiled programs.

    Args:
        lengths: number of tokens in each prompt.
        capacity: maximum number of tokens that a row can hold.
        dtype: name of the dtype of keys and values.
    """
    shortest, longest = min(lengths), max(lengths)
    width = round_up(longest, length_step(longest), capacity)
    floor = shortest - shortest % length_step(shortest)
    return Workload(floor, capacity - floor, len(lengths), dtype, width=width)


class GenerateKeywords(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, for type checkers."""

    max_new_tokens: int
    sampler: Sampler | None
    seed: int
    fetch: str
    capacity: int | None
    state: KVState | None
    stop: str | int | Sequence[str | int] | None
    prefill: PrefillAttention | None
    verify: bool
    fitted: Fitted | None
    speculate: Drafter | None
    plain: bool


@dataclasses.dataclass(frozen=True, eq=False)
class GenerateOptions:
    """The arguments of `generate` except the model and the prompt, and four more options.

    Attributes:
        policy, max_new_tokens, sampler, seed, fetch, capacity, state, stop, prefill, verify, fitted,
            speculate, plain: see `generate`.
        progress: called with a `PrefillProgress` after each unit of the prefill, which is then waited for. With a
            state, it is called after each piece of the prompt that is appended.
        spare: number of tokens that the capacity should have beyond the need of this call. The model's context limits
            the capacity.
        before: the token ids that each row of `state` holds, for a drafter that searches the text. None: not known.
        returns_state: whether the caller may ask for the final state. If not, no fork is kept for stop strings.
    """

    policy: Policy | None = None
    max_new_tokens: int = 128
    sampler: Sampler | None = None
    seed: int = 0
    fetch: str = "auto"
    capacity: int | None = None
    state: KVState | None = None
    stop: str | int | Sequence[str | int] | None = None
    prefill: PrefillAttention | None = None
    verify: bool = False
    fitted: Fitted | None = None
    speculate: Drafter | None = None
    plain: bool = False
    progress: Progress | None = None
    spare: int = 0
    before: Sequence[Sequence[int]] | None = None
    returns_state: bool = True

    def check(self, params: Params) -> None:
        """Raise ConfigError or CapacityError if a setting is out of range for the model."""
        check_integer("max_new_tokens", self.max_new_tokens, least=0)
        check_sampling(self.sampler, self.seed)
        if self.capacity is not None:
            check_capacity(params.config, self.capacity, 1)
        if self.prefill is not None and self.state is not None:
            raise ConfigError(
                f"prefill must be None with a state, because its prompt was read before, got {self.prefill!r}"
            )

    def fetch_setting(self) -> str:
        """Return the fetch mode to use, or "auto" if it depends on the sizes: that of the state if there is one.

        With `verify` and without a state, "auto" means "device_put", because only offloaded rows can be verified.

        Raises:
            StateMismatch: `fetch` is another mode than that of the state.
            ConfigError: the mode is unknown, or `verify` is used with the mode "resident".
        """
        check_fetch(self.fetch)
        mode = "device_put" if self.verify and self.fetch == "auto" else self.fetch
        if self.state is not None:
            if self.fetch not in ("auto", self.state.fetch):
                raise StateMismatch(f"fetch must be the state's own {self.state.fetch!r}, got {self.fetch!r}")
            mode = self.state.fetch
        if self.verify and mode == "resident":
            raise ConfigError("fetch must offload where verify=True, got 'resident'")
        return mode

    def needed_capacity(self, params: Params, longest: int) -> int:
        """Return the capacity to allocate for each row. The longest prompt has `longest` tokens.

        Raises:
            CapacityError: that prompt and `max_new_tokens` do not fit.
        """
        context = params.config.context
        needed = longest + self.max_new_tokens
        limit = context if self.capacity is None else self.capacity
        name = "the model's context" if self.capacity is None else "capacity"
        if needed > limit:
            raise CapacityError(
                f"prompt + max_new_tokens must be at most {name}={limit} tokens, got {longest} + {self.max_new_tokens}"
            )
        capacity = (
            round_up(needed + self.spare, length_step(needed + self.spare), context)
            if self.capacity is None
            else self.capacity
        )
        check_capacity(params.config, capacity, longest)
        return capacity
