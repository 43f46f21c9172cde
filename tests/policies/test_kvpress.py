"""NVIDIA's kvpress keeps the tokens that jshadow keeps: SmolLM2, all layers and heads, token by token.

What kvpress keeps stands in tests/references. docs/benchmarks/tests.md has the figures.
"""

import functools

import jax
import kvpress_kept
import make
import numpy as np
import pytest
from kvpress_kept import CHUNK, RATIOS, SAFEGUARDS, TWICE, places, told_by

import jshadow
from jshadow.cache.prompt_walk import prompts_of
from jshadow.engine.prefill.whole import prefill_many
from jshadow.planner.bytes import cache_specs
from jshadow.policies import TOVA, AdaKV, ExpectedAttention, Full, KeyDiff, KVzip, SnapKV
from jshadow.policies.eviction import KeptPrompt

TEXTS = {"documentation": 1024, "code": 512, "diary": 777}  # and their tokens
ALL = 0.9999  # both libraries compute in float32, but they add in another order
# The policy that keeps n tokens, and the share of tokens that must be the same.
METHODS = {
    "tova": (lambda n: TOVA(kept=n), ALL),
    "keydiff": (lambda n: KeyDiff(kept=n), ALL),
    "expected_attention": (lambda n: ExpectedAttention(kept=n), ALL),
    "expected_attention, epsilon": (lambda n: ExpectedAttention(kept=n, sinks=7, future=64, epsilon=0.01), ALL),
    "snapkv": (lambda n: SnapKV(n, observation_window=64, kernel=5, pooling="avg"), ALL),
    "snapkv, defaults": (lambda n: SnapKV(n), 0.75),
    "adakv, keydiff": (lambda n: AdaKV(kept=n, scores="keydiff"), ALL),
    "adakv, expected_attention": (lambda n: AdaKV(kept=n, scores="expected_attention", safeguard=0.4), ALL),
}


def kept_keys(frozen):
    """The kept keys of each head, [n, d] each, of the first row."""
    if isinstance(frozen, KeptPrompt):
        return list(np.asarray(frozen.kept.k[0]))
    owner, held, blocks = (np.asarray(x[0]) for x in (frozen.owner, frozen.held, frozen.kept.k))
    return [
        np.concatenate([block[:count] for one, count, block in zip(owner, held, blocks, strict=True) if one == head])
        for head in range(owner.max() + 1)
    ]


our_model = functools.cache(lambda folder: jshadow.load(folder, dtype="float32"))


def ours(folder, tokens):
    """The positions that jshadow keeps, by method, ratio and layer."""
    params, count, found, programs = our_model(folder), len(tokens), {}, {}
    for name, (policy_of, _) in METHODS.items():
        for ratio in RATIOS:
            policy = policy_of(max(1, int(count * (1 - ratio)))).resolve(params.config, count)
            spec = cache_specs(params.config, policy, 1, count, count, "float32", "resident")[0]
            program = jax.jit(
                lambda prompt, policy=policy, spec=spec: policy.compress(spec, policy.init(spec), prompt)[0].frozen
            )
            programs[name, ratio] = program, policy.reads.last_queries
    for layer, prompt in enumerate(prompts_of(params, np.array(tokens))):
        every = np.asarray(prompt.k_post[0]).swapaxes(0, 1)
        for name, (compress, last) in programs.items():
            tail = prompt.q_post[:, count - last :] if last else None
            found[*name, layer] = places(kept_keys(compress(prompt.replace(q_tail=tail))), every)
    return found


def ours_twice(folder, tokens):
    """The positions that jshadow keeps by KVzip, in the same form."""
    params, count, found = our_model(folder), len(tokens), {}
    for name, normalized in TWICE.items():
        kept = [max(1, int(count * (1 - ratio))) for ratio in RATIOS]
        policies = [KVzip(kept=n, chunk=CHUNK, normalized=normalized) for n in kept]
        prompt = np.array([tokens]), np.array([count])
        (_, full), *others = prefill_many(params, *prompt, [Full(), *policies], capacity=count)
        for ratio, (_, state) in zip(RATIOS, others, strict=True):
            for layer, (every, some) in enumerate(zip(full.layers, state.layers, strict=True)):
                found[name, ratio, layer] = places(kept_keys(some.frozen), np.asarray(every.live.cache.k[0]))
    return found


def theirs(text, mine):
    """The positions that kvpress keeps in a layer, or None for a head that keeps more than two others than jshadow.

    The positions that two heads keep apart are told by the short form of one of them.
    """
    arrays, count = make.committed("kvpress")["arrays"], TEXTS[text]
    found = {}
    for (name, ratio, layer), heads in mine.items():
        method = "snapkv" if name == "snapkv, defaults" else name
        if (bits := arrays.get(f"{text}/{method}/{ratio}/bits")) is not None:
            whole = np.unpackbits(bits[layer], axis=-1, count=count)
            found[name, ratio, layer] = [set(np.flatnonzero(head).tolist()) for head in whole]
        else:
            pairs = zip(arrays[f"{text}/{method}/{ratio}"][layer], heads, strict=True)
            found[name, ratio, layer] = [told_by(int(form), some, count) for form, some in pairs]
        for head, size in zip(found[name, ratio, layer], arrays[f"{text}/{method}/{ratio}/kept"][layer], strict=True):
            assert head is None or len(head) == size
    return found


def test_two_positions_that_differ_are_told_by_the_short_form():
    kept = set(np.random.default_rng(0).permutation(777)[:388].tolist())
    gone, new = min(kept), min(set(range(777)) - kept)
    form = kvpress_kept.short(kept)
    assert told_by(form, kept, 777) == kept
    assert told_by(form, kept - {gone}, 777) == kept
    assert told_by(form, kept | {new}, 777) == kept
    assert told_by(form, kept - {gone} | {new}, 777) == kept
    others = sorted(set(range(777)) - kept)[:3]
    assert told_by(form, kept.union(others), 777) is None


@pytest.mark.real
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("text", TEXTS)
def test_kvpress_keeps_the_same_tokens(text, smollm2_dir, record_property):
    count, tokens = TEXTS[text], make.texts()[text]
    assert len(tokens) == count
    got = ours(smollm2_dir, tokens) | ours_twice(smollm2_dir, tokens)
    want = theirs(text, got)
    shares = {name: least for name, (_, least) in METHODS.items()} | dict.fromkeys(TWICE, ALL)
    for name, least in shares.items():
        for ratio in RATIOS:
            same = total = heads = 0
            theirs_kept = make.committed("kvpress")["arrays"]
            for layer in range(30):
                for one, other in zip(want[name, ratio, layer], got[name, ratio, layer], strict=True):
                    if name not in SAFEGUARDS and name not in TWICE:
                        assert len(set(other)) == len(other) == int(count * (1 - ratio))
                        assert one is None or len(one) == len(other)
                    same, total = same + len((one or set()) & set(other)), total + len(other)
                    heads += one != set(other)
            record_property(f"{name}, {ratio}", f"{same} of {total} tokens, {heads} heads of 90 differ")
            assert total == 90 * int(count * (1 - ratio))
            # The budget of a layer is that of a head times three here. KVzip of kvpress rounds it once.
            sizes = theirs_kept[f"{text}/{'snapkv' if name == 'snapkv, defaults' else name}/{ratio}/kept"]
            assert sizes.sum(dtype=int) - total in ((0, 30, 60) if name in TWICE else (0,))
            print(f"{text}: {name}, {ratio}: {same} of {total} tokens, {heads} heads of 90 differ")
            assert same >= least * total
