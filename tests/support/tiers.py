"""Which cases `make test` runs, and which only `make test-all` runs.

`make test` must prove the library within minutes, and most of a case's time is compiling. So every policy meets the
laws that share the compiled prefill and step of other laws, a few policies meet all laws, and the tests in FEW_CASES
run on some of their cases. All other cases have the marker `whole`. Tests that are not named here always run.

The cases with that marker take long. `make test-tiny PART=2/6` runs the quick cases, and every sixth group of the
others. `make test-quick PART=1/3` and `make test-slow PART=1/3` run every third group of theirs.
"""

import zlib

# These meet every law in `make test`: exact attention, a retrieval of tokens, the paper's method.
QUICK_POLICIES = ("full", "quest", "shadowkv")
# Every registered policy meets these in `make test`; variants of policies do not.
QUICK_LAWS = (
    "test_nominal_is_at_or_under_its_share",
    "test_there_and_back",
    "test_what_is_put_around_is_checked",
)
# Only `make test-all` runs these.
WHOLE_TESTS = (
    "test_against_the_oracle",
    "test_a_fresh_process_finds_a_document_and_answers_alike",
    "test_a_policy_that_attends_by_fetch_mode",
    "test_later_tokens_in_other_codes",
    "test_packed_rows_come_alike_in_every_fetch_mode",
    "test_they_keep_every_law",
    "test_two_processes_read_a_library_in_parts",
)
# Of these, `make test` runs the cases whose ids stand here.
FEW_CASES = {
}


# Of these, `make test` runs one case of so many: the first, and each that comes so many places later.
ONE_OF = {
    "test_a_capacity_without_a_whole_chunk": 3,
    "test_a_policy_keeps_its_code_at_a_share": 3,
    "test_appended_tokens": 4,
    "test_calls_in_a_row": 9,
    "test_chosen_chunks": 6,
    "test_host_rows_are_the_oracle_s": 3,
    "test_it_runs_on_a_tiny_model": 9,
    "test_keys": 3,
    "test_keys_and_values": 6,
    "test_landmarks_and_scores_are_the_oracle_s": 4,
    "test_scores": 6,
    "test_subspace_iteration_loses_at_most_one_percent_more_than_the_optimum": 4,
    "test_the_kernel_reads_from_the_host_what_it_must_and_once": 3,
    "test_the_kernel_reads_the_landmarks_of_chosen_chunks_once_and_nothing_beyond": 3,
    "test_the_kernel_touches_nothing_beyond_its_arrays": 4,
}


def is_whole(function: str, case: str, policy: str, index: int, registered: bool) -> bool:
    """Whether only `make test-all` runs a case.

    Args:
        function: name of the test function.
        case: the id of its parameters, or "".
        policy: the name in POLICY_CASES that it runs on, or "".
        index: its place among the cases of its function, from 0.
        registered: whether the case of POLICY_CASES is that of a registered policy, not of a variant.
    """
    if function in WHOLE_TESTS:
        return True
    if function in FEW_CASES:
        return case not in FEW_CASES[function]
    if index % ONE_OF.get(function, 1):
        return True
    return bool(policy) and policy not in QUICK_POLICIES and not (registered and function in QUICK_LAWS)


def is_in_part(group: str, part: str) -> bool:
    """Whether the cases of a group belong to a part of the suite.

    Args:
        group: the policy of the cases, which share programs, or the name of a case without a policy.
        part: "K/N", the part K of N, from 1. "": all cases.
    """
    if not part:
        return True
    number, parts = map(int, part.split("/"))
    assert 1 <= number <= parts, part
    return zlib.crc32(group.encode()) % parts == number - 1
