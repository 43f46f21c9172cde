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
)
# Only `make test-all` runs these.
WHOLE_TESTS = (
)
# Of these, `make test` runs the cases whose ids stand here.
FEW_CASES = {
}


# Of these, `make test` runs one case of so many: the first, and each that comes so many places later.
ONE_OF = {
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
