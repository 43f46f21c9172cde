"""The laws that every policy keeps, as functions that need neither pytest nor the tests folder.

A law is a sentence and a check of one case: a policy in one of two settings, in a fetch mode, on a tiny random model
and one ragged batch. `jshadow laws my_module:MyPolicy` runs all of them. In Python:

    from jshadow.evaluation.laws import run_laws, subject_of

    for outcome in run_laws(subject_of(MyPolicy)):
        print(outcome.status, outcome.law.name, *outcome.broken)
"""

from jshadow.evaluation.laws import answers, rows, states, turns
from jshadow.evaluation.laws.inputs import subject_of as subject_of
from jshadow.evaluation.laws.law import LAWS as LAWS
from jshadow.evaluation.laws.law import Case as Case
from jshadow.evaluation.laws.law import Law as Law
from jshadow.evaluation.laws.law import LawBroken as LawBroken
from jshadow.evaluation.laws.law import Subject as Subject
from jshadow.evaluation.laws.run import Outcome as Outcome
from jshadow.evaluation.laws.run import run_laws as run_laws

__all__ = [
    "LAWS",
    "Case",
    "Law",
    "LawBroken",
    "Outcome",
    "Subject",
    "answers",
    "rows",
    "run_laws",
    "states",
    "subject_of",
    "turns",
]
