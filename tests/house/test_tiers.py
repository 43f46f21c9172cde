"""The table of tiers names tests and cases that exist."""

import re
from pathlib import Path

import tiers

TESTS = Path(__file__).resolve().parents[1]
DEFINED = {
    name
    for folder in (TESTS, TESTS.parent / "tools")
    for path in folder.rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def test_every_test_in_the_table_exists():
    named = {*tiers.QUICK_LAWS, *tiers.WHOLE_TESTS, *tiers.FEW_CASES, *tiers.ONE_OF}
    assert not named - DEFINED


def test_the_cases_of_a_test_in_the_table_exist(request):
    """In a run of the whole suite: an id that no case has would leave a test out of `make test` unseen."""
    ran = {}
    for item in request.session.items:
        if hasattr(item, "callspec"):
            ran.setdefault(item.originalname, set()).add(item.callspec.id)
    for function, cases in tiers.FEW_CASES.items():
        assert not ran.get(function) or set(cases) <= ran[function], function
