"""Needles at every phase: where they lie, and the figures by phase."""

import pytest
from tokenizers_by_kind import TOKENIZERS

from jshadow.evaluation import rows, tasks
from jshadow.evaluation.tasks.needle_phases import PHASE_TASKS, PHASES


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", PHASE_TASKS)
def test_the_samples_go_through_all_phases(task: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for index in range(PHASES + 3):
        case, depth = tasks.sample_of(task, tokenizer, 901, index, PHASES + 3, 5)
        [sample], [planted] = case.samples, case.planted
        assert len(case.prompt) == 901
        assert planted % PHASES == index % PHASES
        text = tokenizer.decode(list(case.prompt[planted:]))
        fact = tasks.FACT.format(city=sample.question.split(" of ")[1].split("?")[0], number=sample.answer)
        assert text.lstrip().startswith(fact)
        assert sample.context in tokenizer.decode(list(case.prompt))
        assert fact in sample.context
        assert abs(planted / 901 - depth) < 0.25


def test_figures_by_phase() -> None:
    hits = [index % 3 == 0 for index in range(11)]
    records = [
        {"score": 100.0 * hit, "hits": [hit], "kl": None, "attended_tokens": 1.0, "hit_rate": None, "outputs": [""]}
        for hit in hits
    ]
    heads = [{"task": "needle_noise_phases", "infeasible": None, "control_of": None}]
    [row] = rows.with_figures(heads, [None] * 11, [[record] for record in records])
    assert row["phase_asked"] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert row["phase_found"] == [1, 1, 0, 1, 0, 0, 1, 0]
    [row] = rows.with_figures([heads[0] | {"task": "needle_noise"}], [None] * 11, [[record] for record in records])
    assert "phase_found" not in row
