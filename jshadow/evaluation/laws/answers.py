"""Laws about logits: lossless settings equal full attention, and neither fetch mode nor jit changes the results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.evaluation.laws.inputs import (
    BATCH,
    FETCH_MODES,
    STEPS,
    TINY,
    abstract,
    changing,
    model,
    offloads,
    prefilled,
    run_steps,
    same_settings,
    state_of,
    teacher_forced,
)
from jshadow.evaluation.laws.law import (
    Case,
    Subject,
    both_settings,
    close,
    equal,
    holds,
    in_each_mode,
    in_one_mode,
    law,
    lossless_only,
)
from jshadow.policies.base import Policy
from jshadow.policies.full import Full

# The largest difference of logits that bfloat16 with its 8 significant bits may cause. Logits have a standard deviation
# of about 1.
BF16_TOLERANCE = 0.12
# The smallest difference of logits from full attention that counts as an effect of the small settings.
VISIBLE = 0.05


def _lossless_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases with lossless settings in every fetch mode."""
    return [Case(subject, fetch, "lossless") for fetch in fetches]


@law(
    "With lossless settings, the logits and the greedy tokens equal those of full attention.",
    cases=_lossless_cases,
    unclaimed=lossless_only,
)
def lossless_is_full(case: Case) -> None:
    """Compare the logits of the prompt and of six given tokens, and eight greedily generated tokens."""
    logits, state = prefilled(case.policy, case.fetch)
    full_logits, full_state = prefilled(Full())
    close(logits, full_logits, 1e-4, "the prompt's logits")
    close(teacher_forced(case.policy, case.fetch), teacher_forced(Full(), "resident"), 1e-4, "the steps' logits")
    first = np.asarray(full_logits).argmax(-1).astype(np.int32)
    equal(_greedy(state, first), _greedy(full_state, first), "greedy tokens")


def _greedy(state: KVState, token: np.ndarray) -> np.ndarray:
    """Generate eight tokens greedily after `token` [B]: int32 [8, B]."""
    tokens = []
    for _ in range(8):
        logits, state = decode.decode_step(model(), token, state)
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        tokens.append(token)
    return np.stack(tokens)


@law(
    "With lossless settings in bfloat16, the logits equal those of full attention up to rounding to bfloat16.",
    cases=lambda subject, fetches: _lossless_cases(subject, fetches[:1]),
    unclaimed=lossless_only,
)
def lossless_is_full_in_bfloat16(case: Case) -> None:
    """Compare the logits of six steps."""
    lossless = teacher_forced(case.policy, case.fetch, "bfloat16")
    close(lossless, teacher_forced(Full(), "resident", "bfloat16"), BF16_TOLERANCE, "the steps' logits")


def _drops_something(subject: Subject) -> str | None:
    """Return why the small settings need not differ from full attention, or None if they must."""
    return "its small settings are its lossless ones" if same_settings(subject) else None


@law(
    "With small settings, the logits differ from those of full attention, so the settings have an effect.",
    cases=in_one_mode,
    unclaimed=_drops_something,
)
def small_is_not_full(case: Case) -> None:
    """Compare the logits of the longest prompt. Without this law, a policy that ignores its settings would pass."""
    apart = np.abs(teacher_forced(case.policy, case.fetch) - teacher_forced(Full(), "resident"))[0].max()
    holds(
        apart > VISIBLE, f"logits of the longest prompt differ from full attention's by {apart:.3g} only, not {VISIBLE}"
    )


def has_host_rows(subject: Subject) -> str | None:
    """Return why a law about host memory does not apply to a policy, or None if it applies."""
    return None if offloads(subject.small) else "it keeps nothing in host memory"


def _has_no_host_rows(subject: Subject) -> str | None:
    """Return why a law about policies without host memory does not apply to a policy, or None if it applies."""
    return "it keeps rows in host memory" if offloads(subject.small) else None


@law(
    "A policy that keeps nothing in host memory has the same program in all fetch modes.",
    cases=lambda subject, fetches: [Case(subject)],
    unclaimed=_has_no_host_rows,
)
def one_program_without_host_rows(case: Case) -> None:
    """Compare the lowered programs of a step as text."""
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    texts = [
        jax.jit(decode.step, static_argnums=1).lower(model().weights, TINY, token, abstract(case, fetch)).as_text()
        for fetch in FETCH_MODES
    ]
    holds(len(set(texts)) == 1, f"the step's programs differ in the fetch modes {FETCH_MODES}")


def _agreeing_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases of both settings in the given fetch modes, except "resident"."""
    return [case for case in both_settings(subject, fetches) if case.fetch != "resident"]


@law(
    "The logits and the selected units are the same in all fetch modes.",
    cases=lambda subject, fetches: _agreeing_cases(subject, (*dict.fromkeys((*fetches, *FETCH_MODES[1:])),)),
    unclaimed=has_host_rows,
)
def fetch_modes_agree(case: Case) -> None:
    """Compare the case's mode with "resident": the logits of six steps, and then the selected units."""
    close(teacher_forced(case.policy, "resident"), teacher_forced(case.policy, case.fetch), 1e-4, "the steps' logits")
    resident, offloaded = (_selected_units(case.policy, fetch) for fetch in ("resident", case.fetch))
    holds(resident.keys() == offloaded.keys(), f"states have the leaves {sorted(resident)} and {sorted(offloaded)}")
    for path, units in resident.items():
        equal(np.sort(units), np.sort(offloaded[path]), path)


@functools.cache
def _selected_units(policy: Policy, fetch: str) -> dict[str, np.ndarray]:
    """Return the state's leaves named `resident` after six steps. They hold the units that the last query selected."""
    state = run_steps(model(), prefilled(policy, fetch)[1], STEPS[:, :6])[1]
    return {path: leaf for path, leaf in changing(state).items() if path.endswith(".resident")}


@law(
    "A step under jit gives the same logits and the same state as the step without jit.",
    cases=in_one_mode,
)
def jit_is_no_jit(case: Case) -> None:
    """Compare one step under jit with the same step without jit, where each operation is a separate program."""
    state, token = state_of(case), jnp.asarray(STEPS[:, 0])
    plain, plain_state = decode.step(model().weights, TINY, token, state)
    jitted, jitted_state = decode.decode_step(model(), token, state.fork())
    close(plain, jitted, 1e-4)
    plain_leaves = changing(plain_state)
    for path, leaf in changing(jitted_state).items():
        close(plain_leaves[path], leaf, 1e-4, path)


@law("A step or a turn does not change any shape, dtype, memory kind or static field of the state.", cases=in_each_mode)
def steps_change_no_shape(case: Case) -> None:
    """Compare descriptions of the state before and after. Trees are equal only if their static fields are equal."""

    def describe(state: KVState) -> object:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding.memory_kind), state)

    state = state_of(case)
    before = describe(state)
    once = decode.decode_step(model(), STEPS[:, 0], state)[1]
    holds(describe(once) == before, "a step changes the description of the state")
    turned = decode.extend(model(), STEPS[:, :7], [3, 0, 2], once, logits="all")[1]
    holds(describe(turned) == before, "a turn changes the description of the state")
