"""The laws that every policy must keep. They need neither pytest nor the tests folder.

A law is a sentence, and a function that checks it on one case. A case is a policy with its small or lossless settings
in one fetch mode. All cases use the same tiny random model and the same ragged batch. The command
`jshadow laws my_module:MyPolicy` runs all laws. In Python:

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
