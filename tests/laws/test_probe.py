"""The probe policy, which uses every hook of the contract, against a NumPy oracle of its own and hook by hook."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CAPACITY, FETCH_MODES, LENGTHS, POLICY_CASES, PROMPT, STEPS, TINY, model, prefilled, run_steps
from few import quick
from oracle_maths import apply_rope, attention, linear, lowest, rms_norm, softmax, tokens_of
from oracle_sisters import causal_probs
from probe import PRIOR_WEIGHT, Follower, Probe, Scout, Speculator

from jshadow.cache import offload
from jshadow.engine import decode

PROBE: Probe = POLICY_CASES["probe"].restricted


class ProbeOracle(oracle.Oracle):
    """The probe of one row in float64, written from its docstring: every key is kept, sets say who is attended."""

    def __init__(self, weights, config, probe: Probe) -> None:
        super().__init__(weights, config, oracle.Full())
        self.probe, self.guess, self.chosen = probe, 0, []

    def remember(self, layer, cache, q):
        unit, tokens = self.probe.unit, len(q)
        if layer == 0:
            self.mass, self.prior = np.zeros(CAPACITY // unit + 1), {}
            np.add.at(self.mass, np.arange(tokens) // unit, causal_probs(q, cache.k_post).sum(axis=(0, 1)))
        self.prior[layer] = self.unit_scores(q[-self.probe.tail :], cache.k_post, tokens // unit)

    def unit_scores(self, queries, keys, units):
        """[h_kv, units]: softmax over whole units of each query [n, h_q, d], summed, maximum over the group."""
        unit, h_kv = self.probe.unit, keys.shape[1]
        means = keys[: units * unit].reshape(units, unit, h_kv, keys.shape[2]).mean(axis=1)
        scores = np.zeros((h_kv, units))
        for query in queries if units else ():
            grouped = query.reshape(h_kv, -1, query.shape[-1])
            logits = np.einsum("hgd,jhd->hgj", grouped, means) / np.sqrt(query.shape[-1])
            scores += softmax(logits).max(axis=1)
        return scores

    def step(self, token):
        config, rope, unit = self.config, self.config.rope, self.probe.unit
        x = self.weights["embed"]["embedding"][[token, self.guess]]
        held, speculated = len(self.caches[0].k_pre) + 1, None
        first = max(held - self.probe.recent, 0)
        candidates = -(-first // unit)  # units with a token before `first`
        for i, cache in enumerate(self.caches):
            layer = self.weights[f"layer_{i}"]
            q_pre, k_pre, v = self.project(layer, x)
            cache.k_pre, cache.v = np.concatenate([cache.k_pre, k_pre[:1]]), np.concatenate([cache.v, v[:1]])
            q, own = (apply_rope(part, np.array([held - 1, held]), rope) for part in (q_pre, k_pre))
            keys = apply_rope(cache.k_pre, np.arange(held), rope)
            if i == 0:
                tokens = [np.arange(held)] * config.kv_heads
                wide = np.repeat(keys, config.group, axis=1)
                probs = softmax(np.einsum("hd,khd->hk", q[0], wide) / np.sqrt(q.shape[-1]))
                np.add.at(self.mass, np.arange(held) // unit, probs.sum(axis=0))
            else:
                scores = np.tile(self.mass[:candidates], (config.kv_heads, 1))
                if i % 2:
                    prior = np.zeros((config.kv_heads, CAPACITY))
                    prior[:, : self.prior[i].shape[1]] = self.prior[i]
                    scores = self.unit_scores([speculated], keys, candidates) + PRIOR_WEIGHT * prior[:, :candidates]
                units = [sorted(lowest(-row, self.probe.keep)) for row in scores]
                self.chosen.append((i, units))
                old = [tokens_of(row, unit) for row in units]
                tokens = [np.concatenate([row[row < first], np.arange(first, held)]) for row in old]
            out = []
            for h, (kept, queries) in enumerate(zip(tokens, np.split(q, config.kv_heads, axis=1), strict=True)):
                k, values = keys[kept, h], cache.v[kept, h]
                real = attention(queries[0], k, values)
                guess = attention(queries[1], np.vstack([k, own[1:, h]]), np.vstack([values, v[1:, h]]))
                out.append(np.stack([real, guess]))
            if i + 1 < config.num_layers:
                normed = rms_norm(x, layer["attention_norm"]["scale"], config.norm_eps)
                ahead = linear(normed, self.weights[f"layer_{i + 1}"]["attention"]["q"]).reshape(q.shape)
                speculated = apply_rope(ahead, np.array([held - 1, held]), rope)[0]
            x = self.finish_block(layer, x, np.concatenate(out, axis=1))
        self.guess = int(self.logits(x[1]).argmax())
        return self.logits(x[0])


@pytest.mark.parametrize("fetch", quick(["device_put"], FETCH_MODES))
def test_probe_equals_its_oracle(fetch):
    """Twelve steps: the open unit is completed several times, leaves the ring, and is fetched from the tail."""
    logits, state = prefilled("probe", "restricted", fetch)
    assert [type(spec.policy) for spec in state.specs] == [Scout, Speculator, Follower]
    runs = [ProbeOracle(model().weights, TINY, PROBE) for _ in LENGTHS]
    want = [run.prefill(PROMPT[row, : LENGTHS[row]].tolist()) for row, run in enumerate(runs)]
    np.testing.assert_allclose(logits, np.stack(want), atol=1e-4)
    for tokens in STEPS.T:
        logits, state = decode.decode_step(model(), tokens, state)
        want = [run.step(int(token)) for run, token in zip(runs, tokens, strict=True)]
        np.testing.assert_allclose(logits, np.stack(want), atol=1e-4)
        assert np.asarray(state.shared.guess).tolist() == [run.guess for run in runs]
    (scout, live), (spec, layer) = (state.layers[0].frozen, state.layers[0].live), (state.specs[1], state.layers[1])
    # every query of the prompt and of the steps gave one unit of mass a head
    total = (np.asarray(scout.mass) + np.asarray(live.mass)).sum(axis=(1, 2))
    np.testing.assert_allclose(total, TINY.q_heads * (np.asarray(LENGTHS) + STEPS.shape[1]), rtol=1e-5)
    for row, run in enumerate(runs):
        last = {layer: [set(units) for units in chosen] for layer, chosen in run.chosen[-2:]}
        start, stored = int(layer.frozen.units[row]), spec.capacity // PROBE.unit
        ids = np.asarray(layer.live.resident[row])
        units = [{int(i if i < stored else i - stored + start) for i in head if i >= 0} for head in ids]
        assert units == last[1]
    # the host tail is really read: the last row's prompt has a single whole unit
    assert any(unit >= start for _, chosen in run.chosen for head in chosen for unit in head)


@pytest.mark.slow
def test_what_arrived_early_is_attended_from_the_buffer(monkeypatch):
    """Rows fetched in the step itself are spoilt wherever the buffer has them: nothing changes."""
    good, _ = run_steps(model(), prefilled("probe", "lossless", "device_put")[1], STEPS[:, :3])
    fetch = offload.fetch

    def spoil(spec, tier, selection, layout):
        fetched = fetch(spec, tier, selection, layout)
        if selection.hit is None:
            return fetched
        hit = jnp.repeat(selection.hit & selection.valid, layout.unit, axis=2)[..., None]
        return fetched.replace(k=fetched.k + 100.0 * hit, v=fetched.v + 100.0 * hit)

    monkeypatch.setattr(offload, "fetch", spoil)
    step = jax.jit(lambda token, state: decode.step(model().weights, TINY, token, state))
    state, out, hits = prefilled("probe", "lossless", "device_put")[1], [], []
    for i in range(3):
        logits, state = step(STEPS[:, i], state)
        out.append(logits)
        hits.append(int(state.counters.hits.sum()))
    assert hits[0] == 0, "nothing can have arrived before the first step"
    assert hits[2] > hits[1] > 0
    np.testing.assert_allclose(np.stack(out, axis=1), good, atol=1e-4)


def test_a_guess_is_never_remembered():
    """Another guess changes no logits and no cache of the real rows."""
    _, state = prefilled("probe", "restricted", "device_put")
    other = state.fork()
    guess = jax.device_put(np.asarray(other.shared.guess) + np.int32(17))
    other = other.replace(shared=other.shared.replace(guess=guess))
    (logits, after), (again, beside) = (decode.decode_step(model(), STEPS[:, 0], one) for one in (state, other))
    np.testing.assert_array_equal(logits, again)
    for mine, theirs in zip(after.layers, beside.layers, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine.live.recent, theirs.live.recent)
        jax.tree.map(np.testing.assert_array_equal, mine.host, theirs.host)


def test_a_plan_for_a_layer_that_is_done_is_refused(monkeypatch):
    def plan(self, spec, state, step):
        (selection,) = original(self, spec, state, step)
        return (dataclasses.replace(selection, layer=spec.layer, when="now"),)

    original = Speculator.plan
    monkeypatch.setattr(Speculator, "plan", plan)
    _, state = prefilled("probe", "restricted", "device_put")
    with pytest.raises(AssertionError, match="has attended already"):
        jax.eval_shape(lambda token: decode.step(model().weights, TINY, token, state), STEPS[:, 0])
