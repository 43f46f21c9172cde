"""Which cases `make test` runs, and which only `make test-all` runs.

`make test` must prove the library within minutes, and most of a case's time is compiling. So every policy meets the
laws that share the compiled prefill and step of other laws, a few policies meet all laws, and the tests in FEW_CASES
run on some of their cases. All other cases have the marker `whole`. Tests that are not named here always run.
"""

# These meet every law in `make test`: exact attention, a retrieval of tokens, the paper's method.
QUICK_POLICIES = ("full", "quest", "shadowkv")
# Every policy meets these in `make test`.
QUICK_LAWS = (
    "test_a_consumed_state_says_so",
    "test_a_fork_leaves_its_parent_usable",
    "test_an_abstract_state_is_the_real_one",
    "test_bytes_are_the_leaves_bytes",
    "test_fetch_modes_agree",
    "test_inactive_rows_do_not_change",
    "test_lossless_is_full",
    "test_nominal_is_at_or_under_its_share",
    "test_restricted_is_not_full",
    "test_there_and_back",
    "test_what_is_put_around_is_checked",
)
# Only `make test-all` runs these.
WHOLE_TESTS = ("test_jit_is_no_jit",)
# Of these, `make test` runs the cases whose ids stand here.
FEW_CASES = {
    "test_against_the_oracle": ("h2o", "infllm", "kivi", "loki", "omnikv", "quest", "snapkv", "specache"),
}


def is_whole(function: str, case: str, policy: str) -> bool:
    """Whether only `make test-all` runs a case.

    Args:
        function: name of the test function.
        case: the id of its parameters, or "".
        policy: the name in POLICY_CASES that it runs on, or "".
    """
    if function in WHOLE_TESTS:
        return True
    if function in FEW_CASES:
        return case not in FEW_CASES[function]
    return bool(policy) and policy not in QUICK_POLICIES and function not in QUICK_LAWS
