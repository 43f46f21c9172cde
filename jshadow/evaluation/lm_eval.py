"""jshadow as a model of lm-evaluation-harness (lm-eval), to run its tasks with any policy. Needs the extra `eval`.

This command is the command line of lm-eval with the model "jshadow" registered. (lm-eval 0.4.13 has no plug-ins.)

    python -m jshadow.evaluation.lm_eval run --model jshadow --tasks hellaswag --model_args \\
        pretrained=DIR,policy=shadowkv,rank=32,budget=256,dtype=float32,capacity=2048

In Python, call `lm_eval.simple_evaluate(model=JshadowLM(...), tasks=[...])`.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jshadow.engine.sampling import Sampler
from jshadow.engine.saved.fitted import load_fitted
from jshadow.engine.sparse_prefill import parse_prefill
from jshadow.errors import ConfigError, JshadowError, PromptError, check_integer, check_one_of
from jshadow.evaluation.likelihood import Score, Scorer
from jshadow.policies import Policy, parse_policy
from jshadow.policies.capabilities import with_fitted
from jshadow.policies.settings import policy_settings
from jshadow.weights.params import Params, load
from jshadow.weights.tokenizer import mended

_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # four names of one setting
_FILTERS = ("top_k", "top_p", "min_p")
_KEYS = {"until", "num_beams", "do_sample", "temperature", *_MAX_TOKENS, *_FILTERS}


@dataclasses.dataclass(frozen=True)
class _ModelArguments:
    """The arguments of lm-eval's `--model_args` that are not settings of a policy.

    Attributes:
        dtype: see `jshadow.load`. It is ignored for Params.
        quantize: see `jshadow.load`. It is ignored for Params.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        capacity: maximum number of tokens of a request, which lm-eval calls `max_length`. Settings of a policy may
            depend on it. None means that the model's context is the limit and each width has its own capacity.
        batch_size: maximum number of contexts that are prefilled together.
        prefill: the attention between the tokens of a context, as for `--prefill` of `jshadow eval`.
        fitted: a file of arrays that the policy has learned (`jshadow fit`).
        max_gen_toks: maximum number of new tokens if a task does not set it.
        truncation: "middle" removes tokens from the middle of a context that is too long, and logs a warning. None
            raises an error.
        rolling_context: number of tokens before each window of a rolling log-likelihood, except the first. They are
            prefilled and compressed. `hf` uses 1. With 1, a policy that keeps all new tokens equals full attention.
        add_bos_token: whether special tokens are added to a text. None means the default of the tokenizer.
        prefix_token_id: the token that replaces an empty context. None means the BOS token, or the EOS token if there
            is no BOS token.
        seed: seed of sampled generations.
        max_batch_size: must be None, because there is no search for a batch size.
        device: ignored. lm-eval passes "cuda:0" by default, but JAX chooses the device (`JAX_PLATFORMS`).
    """

    dtype: str = "bfloat16"
    quantize: str | None = None
    fetch: str = "auto"
    capacity: int | None = None
    batch_size: int | str | None = 1
    prefill: str = "exact"
    fitted: str | None = None
    max_gen_toks: int = 256
    truncation: str | None = None
    rolling_context: int = 1
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    seed: int = 0
    max_batch_size: Any = None
    device: Any = None

    @classmethod
    def split(cls, arguments: Mapping[str, Any]) -> tuple["_ModelArguments", dict[str, Any]]:
        """Split arguments into the fields of this class and the remaining ones, which are settings of a policy."""
        names = {field.name for field in dataclasses.fields(cls)}
        settings = {name: value for name, value in arguments.items() if name not in names}
        return cls(**{name: value for name, value in arguments.items() if name in names}), settings


def _whole(name: str, value: Any) -> int:
    """Read an integer of at least 1 from a number or its text. Raises a ConfigError that names `name`."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    check_integer(name, value, least=1)
    return int(value)


def _policy_of(policy: str | Policy, settings: dict[str, Any]) -> Policy:
    """Build a policy from its name and settings. Raises a ConfigError that names an unknown policy or setting."""
    if isinstance(policy, Policy):
        if settings:
            raise ConfigError(f"settings must be left out if policy is a Policy, got {sorted(settings)}")
        return policy
    texts = [f"{name}={'null' if value is None else value}" for name, value in settings.items()]
    return parse_policy(policy, texts)


def parse_generation(settings: dict[str, Any], default: int) -> tuple[Sampler, int, tuple[str, ...]]:
    """Read the generation settings of a task: the sampler, the most new tokens, and the stop strings.

    Tokens are sampled if `do_sample` is true, or if it is missing and the temperature is above 0. Otherwise generation
    is greedy. The default temperature of sampling is 1.

    Raises:
        ConfigError: a key is unknown, two keys have the same meaning, beam search is requested, or a value is out of
            range.
    """
    if unknown := sorted(set(settings) - _KEYS):
        raise ConfigError(f"generation settings must be among {sorted(_KEYS)}, got {unknown[0]!r}")
    if settings.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams must be 1, got {settings['num_beams']!r}")
    counts = {name: settings[name] for name in _MAX_TOKENS if settings.get(name) is not None}
    if len(counts) > 1:
        raise ConfigError(f"max_gen_toks must be given once, got {counts}")
    name, count = next(iter(counts.items()), ("max_gen_toks", default))
    until = settings.get("until") or ()
    texts: Iterable[Any] = (until,) if isinstance(until, str) else until
    do_sample, temperature = settings.get("do_sample"), settings.get("temperature")
    if do_sample is True and temperature == 0:
        raise ConfigError(f"temperature must be above 0 with do_sample=True, got {temperature!r}")
    if do_sample is False or (do_sample is None and not temperature):
        sampler = Sampler()
    else:
        filters = {name: settings[name] for name in _FILTERS if settings.get(name) is not None}
        sampler = Sampler(1.0 if temperature is None else temperature, **filters)
    return sampler, _whole(name, count), tuple(texts)


def _special_ids(tokenizer: Any, texts: Iterable[str]) -> list[int]:
    """Return the ids of those stop strings that are special tokens. Decoded text does not contain special tokens."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
    return [ids[text] for text in ids if ids[text] in tokenizer.all_special_ids]


_LOG = logging.getLogger(__name__)
_TRUNCATIONS = (None, "middle")


class JshadowLM(TemplateLM):
    """A checkpoint with a policy, as a model of lm-eval."""

    def __init__(self, pretrained: Any, *, policy: str | Policy = "shadowkv", **arguments: Any) -> None:
        """Load a model.

        Contexts are padded to a few widths (`likelihood.width_of`), and contexts of one width are batched. The first
        batch of each width compiles its programs. If `capacity` is given, all widths share the program of a decode
        step.

        Args:
            pretrained: a checkpoint directory or hub id for `jshadow.load`, or Params.
            policy: a Policy, or the name of one (`jshadow policies` lists them).
            **arguments: fields of `_ModelArguments`, and settings of the policy such as `rank=32`.

        Raises:
            ConfigError: a setting is unknown or out of range.
            CapacityError: the capacity exceeds the model's context.
            CheckpointError: see `jshadow.load`.
        """
        super().__init__()
        asked, settings = _ModelArguments.split(arguments)
        if asked.max_batch_size is not None:
            raise ConfigError(
                f"max_batch_size must be left out, because no batch size is searched, got {asked.max_batch_size!r}"
            )
        check_one_of("truncation", asked.truncation, _TRUNCATIONS)
        chosen = _policy_of(policy, settings)
        attention = parse_prefill(asked.prefill)
        batch = _whole("batch_size", 1 if asked.batch_size is None else asked.batch_size)
        self.default_tokens = _whole("max_gen_toks", asked.max_gen_toks)
        self.rolling_context = _whole("rolling_context", asked.rolling_context)
        loaded = isinstance(pretrained, Params)
        params = pretrained if loaded else load(str(pretrained), asked.dtype, quantize=asked.quantize)
        if params.tokenizer is None:
            raise ConfigError("pretrained must have a tokenizer, got a checkpoint without one")
        arrays = None if asked.fitted is None else load_fitted(asked.fitted, params, chosen := with_fitted(chosen))
        self.scorer = Scorer(params, chosen, asked.fetch, asked.capacity, batch, attention, arrays)
        if self.rolling_context > self.max_length:
            raise ConfigError(f"rolling_context must be at most {self.max_length}, got {asked.rolling_context}")
        self.tokenizer, self.truncation, self.seed = params.tokenizer, asked.truncation, asked.seed
        self.add_bos_token, self.given_prefix = asked.add_bos_token, asked.prefix_token_id

    # Properties that lm-eval reads

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a request."""
        return self.scorer.limit

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        known = [self.tokenizer.eos_token_id, *self.scorer.params.config.eos_ids]
        token = next((one for one in known if one is not None), None)
        if token is None:
            raise PromptError("prefix_token_id must be given, because neither tokenizer nor config has an EOS token")
        return int(token)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context: the given one, else the BOS token, else the EOS token."""
        known = (self.given_prefix, self.tokenizer.bos_token_id)
        token = next((one for one in known if one is not None), None)
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer for lm-eval's cache of requests: its path with "/" replaced."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries that lm-eval stores with the results: the resolved policy and the settings of the run."""
        scorer = self.scorer
        resolved = scorer.policy.resolve(scorer.params.config, self.max_length)
        prefill = scorer.prefill.label() if scorer.prefill else "exact"
        return {
            "jshadow_policy": resolved.name,
            "jshadow_settings": policy_settings(resolved),
            "jshadow_fetch": scorer.fetch,
            "jshadow_capacity": scorer.capacity,
            "jshadow_prefill": prefill,
            "model_dtype": scorer.params.dtype.name,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text. If it starts with the text of the BOS token, as after a chat template, no BOS is added."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = False if bos and string.startswith(bos) else self.add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(mended(string), **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as text. Without the generation prompt, its last message (a `gen_prefix`) is left open.

        Raises:
            PromptError: the tokenizer has no chat template, or the template refuses the chat.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError("apply_chat_template must be left out, because the tokenizer has no chat template")
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is code in the checkpoint and may raise any error
            raise PromptError(f"the chat template refuses this chat: {error}") from error
        return str(text)

    # Requests

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        """Score each request (context, continuation). An empty context is replaced by the prefix token.

        A score has the sum of the natural logarithms of the probabilities, and whether every token was the most likely
        one. Raises PromptError for an empty continuation, and CapacityError for a request that is too long.
        """
        for index, request in enumerate(requests):
            if not request.args[1]:
                raise PromptError(f"continuation of request {index} must not be empty")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[Score]:
        """Score requests (key of lm-eval's cache or None, context ids, continuation ids)."""
        fitted = self._fitted([context for _, context, _ in requests], [len(one) - 1 for *_, one in requests])
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, one in enumerate(fitted):
            groups.setdefault(tuple(one), []).append(index)
        members = list(groups.values())
        scores = self.scorer.score(list(groups), [[requests[index][2] for index in same] for same in members])
        results: dict[int, Score] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="jshadow: loglikelihood") as bar:
            for context, continuation, score in scores:
                which = members[context][continuation]
                results[which] = score
                if requests[which][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[which][0], score)
                bar.update()
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the natural logarithm of the probability of each request's whole text.

        The text is scored in windows of `max_length` tokens. Every token is scored once. The context of the first
        window is only the prefix token, so all its text attends through the policy. The context of each later window
        has at least `rolling_context` tokens of the text, which are compressed.
        """
        windows: list[tuple[int, list[int], list[int]]] = []
        for index, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, self.rolling_context
            )
            windows += [(index, *make_disjoint_window(pair)) for pair in pairs]
        scores = self._loglikelihood_tokens([(None, *window) for _, *window in windows], disable_tqdm)
        totals = [0.0] * len(requests)
        for (index, _, _), (score, _) in zip(windows, scores, strict=True):
            totals[index] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each request (context, generation settings), up to the first of its `until` strings.

        Raises:
            ConfigError: a generation setting is unknown or out of range.
            CapacityError: a context leaves too little room for max_gen_toks.
        """
        groups: dict[tuple[Sampler, int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(parse_generation(request.args[1], self.default_tokens), []).append(index)
        counts = {one: count for (_, count, _), members in groups.items() for one in members}
        prompts = self._fitted(
            [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests],
            [counts[index] for index in range(len(requests))],
        )
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="jshadow: generate_until") as bar:
            for (sampler, count, until), members in groups.items():
                stop = [*until, *_special_ids(self.tokenizer, until)]
                some = [prompts[one] for one in members]
                generated = self.scorer.generate(some, count, sampler, stop=stop, seed=self.seed, names=members)
                for index, text in generated:
                    texts[members[index]] = text
                    self.cache_hook.add_partial("generate_until", requests[members[index]].args, text)
                    bar.update()
        return [texts[index] for index in range(len(requests))]

    def _fitted(self, contexts: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        """Cut the middle of contexts that are too long if truncation is on. Otherwise raise CapacityError."""
        rooms = [self.max_length - more for more in new]
        over = [len(one) - room for one, room in zip(contexts, rooms, strict=True) if len(one) > room]
        if not over or self.truncation is None or min(rooms) < 1:
            self.scorer.check([len(one) for one in contexts], new)
            return list(contexts)
        _LOG.warning(
            "%d of %d requests were too long for max_length=%d: %d tokens were cut out of the middle of their contexts",
            len(over),
            len(contexts),
            self.max_length,
            sum(over),
        )
        halves = [(room // 2, room - room // 2) for room in rooms]
        return [
            one if len(one) <= first + last else one[:first] + one[len(one) - last :]
            for one, (first, last) in zip(contexts, halves, strict=True)
        ]


def main() -> None:
    """Run the command line of lm-eval with this model registered. The exit status is 2 after an error of jshadow."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    # Import this module by its name, because as "__main__" it would be a second copy and register the model twice.
    import jshadow.evaluation.lm_eval

    jshadow.evaluation.lm_eval.main()
else:
    register: Callable[[type[JshadowLM]], type[JshadowLM]] = register_model("jshadow")
    register(JshadowLM)
