"""Every policy keeps every law of `jshadow.evaluation.laws`.

All laws run in one world, which `jshadow/evaluation/laws/law.py` makes: a tiny model, a ragged batch, a capacity.
Its cached functions `prefilled` and `teacher_forced` hold the prefilled batch of a policy and the logits of six steps.
So the laws of SHARED need three large programs for each policy: the prefill, the step and the turn of seven tokens.
Each law of DEAR needs programs of its own, or dozens of single operations. `make test` runs these on a few policies.
"""

import pytest
from cases import BATCH, DEVICE_ONLY, FETCH_MODES, LOSSLESS, POLICY_CASES, case_of, mode_of
from few import quick

from jshadow.evaluation.laws import LAWS, Case
from jshadow.policies import POLICIES

WHOLE = (*POLICIES, "probe")
# Variants meet the laws of SHARED, and some meet laws of DEAR. Of the others, test_oracle.py has kivi_1bit,
# quantized_int4 and omnikv_window, and tests/policies has two rounds of a choice.
VARIANTS = ("less_taught", "infllm_capped", "shadowkv_reference", "shadowkv_transform", "shadowkv_plus_transform")
VARIANTS += ("shadowkv_plus_preload", "pyramid", "quest_top_p")
OFFLOADING = tuple(name for name in WHOLE if name not in DEVICE_ONLY)
REWINDING = tuple(
    name for name in WHOLE if LAWS["tokens_given_back_leave_nothing"].unclaimed(case_of(name).subject) is None
)
# law -> policies that meet it in `make test`, and all that meet it
DEAR: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lossless_is_full": (
        ("h2o", "quest", "shadowkv"),
        (*(name for name in LOSSLESS if name in WHOLE), "shadowkv_transform", "dense_first", "pyramid"),
    ),
    "lossless_is_full_in_bfloat16": ((), ("h2o", "quest", "specache", "shadowkv_plus")),
    "one_program_without_host_rows": (("full", "h2o"), tuple(name for name in DEVICE_ONLY if name in WHOLE)),
    "fetch_modes_agree": (("quest", "shadowkv"), (*OFFLOADING, "shadowkv_plus_transform")),
    "jit_is_no_jit": ((), ("shadowkv",)),
    "row_alone_is_row_in_batch": ((), ("h2o", "shadowkv")),  # joining_rows_go_on has a row alone, too
    "a_room_changes_no_logits": (("quest",), WHOLE),
    "a_state_gets_room": (("quest",), WHOLE),
    "shared_rows_go_on_alone": (("quest",), WHOLE),
    "joining_rows_go_on": (("shadowkv_plus",), (*WHOLE, "shadowkv_plus_transform")),
    "tokens_given_back_leave_nothing": (("quest",), REWINDING),
    "extend_is_steps": (("quest",), ("quest",)),  # how logits are read off is the same for all
    "long_turn_is_steps": (("quest", "shadowkv"), (*WHOLE, "shadowkv_plus_transform")),
}
ELSEWHERE = ("prefill_pieces_are_one_prefill",)  # tests/engine/test_prefill.py
SHARED = [name for name in LAWS if name not in (*DEAR, *ELSEWHERE)]


def cases_of(law: str, name: str) -> list[Case]:
    """The cases of a law on a policy, in the policy's fetch mode."""
    fetch, case = mode_of(name), case_of(name, mode_of(name))
    if LAWS[law].unclaimed(case.subject) is not None or (law == "steps_leave_the_host_alone" and fetch == "zero_copy"):
        return []
    if law.startswith("lossless"):
        return [case_of(name, fetch, "lossless")]
    if law == "fetch_modes_agree":
        # Where no keys are rebuilt, "zero_copy" is "device_put".
        both = "shadowkv" in name or name in ("quest", "probe")
        return [case_of(name, other) for other in (FETCH_MODES[1:] if both else (fetch,))]
    if law == "row_alone_is_row_in_batch":
        return [case_of(name, fetch, row=row) for row in (0, BATCH - 1)]
    return [case]


def run(cases: list[tuple[str, Case]], record_property) -> None:
    """Check all of these cases of laws, and name each one that is broken."""
    broken: list[Exception] = []
    for law, case in cases:
        try:
            LAWS[law](case)
        except Exception as error:
            error.add_note(f"{law}: {case}")
            broken.append(error)
    record_property("law_cases", len(cases))
    if broken:
        raise ExceptionGroup(f"{len(broken)} laws are broken", broken)


@pytest.mark.parametrize("name", quick(WHOLE, (*WHOLE, *VARIANTS)))
def test_laws_that_share_programs(name, record_property):
    """The first law of a policy pays for the three programs: most policies need three CPU seconds."""
    run([(law, case) for law in SHARED for case in cases_of(law, name)], record_property)


QUICK = [(law, name) for law, (few, _) in DEAR.items() for name in few]
ALL = [(law, name) for law, (_, names) in DEAR.items() for name in names]


@pytest.mark.parametrize(("law", "name"), quick(QUICK, ALL))
def test_law(law, name, record_property):
    cases = [(law, case) for case in cases_of(law, name)]
    if law == "lossless_is_full":  # its state is at hand
        cases.append(("bytes_are_the_leaves_bytes", cases[0][1]))
    run(cases, record_property)


def test_every_policy_meets_every_law():
    assert set(POLICIES) <= set(POLICY_CASES)
    assert {*SHARED, *DEAR, *ELSEWHERE} == set(LAWS)
    assert all(name in POLICY_CASES for quick, names in DEAR.values() for name in {*quick, *names})


def test_some_policies_keep_nothing_on_the_host():
    """The table of those is computed; these are known."""
    device_only = {"full", "streaming_llm", "h2o", "less", "less_taught", "snapkv", "kivi", "kivi_1bit", "quantized"}
    device_only |= {"adakv", "kvzip", "tova", "keydiff", "expected_attention"}
    assert device_only <= set(DEVICE_ONLY)
    offloading = {"quest", "rocketkv", "loki", "infinigen", "omnikv", "specache", "infllm"}
    assert not (offloading | {"shadowkv", "shadowkv_plus", "probe"}) & set(DEVICE_ONLY)
