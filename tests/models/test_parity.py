"""jshadow compared with transformers, whose answers stand in tests/references: tiny checkpoints, and SmolLM2."""

import functools
import json
import sys

import make
import numpy as np
import pytest
import saved
import seeded
from family_cases import ONE_OF_EACH
from few import quick
from safetensors.numpy import load_file

import jshadow

QUICK = ("mistral_sliding", "glm4", "gemma3", "smollm3", "gpt_oss")  # all kinds of RoPE are in test_rope.py
# Of each way in which a layer attends, mixes or chooses experts, the last tokens are also fed in single steps.
STEPPED = (*QUICK, "llama_dynamic", "phi3_partial_longrope", "qwen3_moe_mixed", "glm4_moe_groups", "granitemoe")
STEPPED += ("ministral3", "cohere2", "gemma4", "gemma4_moe", "exaone4", "qwen3_next", "granite_hybrid_moe", "lfm2_moe")
STEPPED += ("nemotron_h_latent",)
QUICK_SAVED = (*ONE_OF_EACH, "gqa-llama3", "gqa-biased", "gpt_oss")


@functools.cache
def references(part):
    """The committed JSON and arrays of a part."""
    made = make.committed(part)
    return made["told"], made["arrays"]


def full_logits(params, tokens, steps):
    """Logits [1, T, V] of full attention: the prompt in one prefill, the last tokens one by one."""
    size = tokens.shape[1]
    count = np.array([size - steps])
    logits, state = jshadow.prefill(params, tokens[:, : count[0]], count, jshadow.Full(), capacity=size, logits="all")
    parts = [np.asarray(logits)]
    for index in range(count[0], size):
        out, state = jshadow.decode_step(params, tokens[:, index], state)
        parts.append(np.asarray(out)[:, None])
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("case", quick(QUICK, seeded.CASES))
def test_logits_are_those_of_transformers(tmp_path, case):
    """Where the length decides on the rotation, also within the original context."""
    params = jshadow.load(seeded.write_checkpoint(case, tmp_path / case), dtype="float32")
    for length in seeded.lengths_of(case):
        steps = seeded.STEPS if case in STEPPED else 0
        got = seeded.part_of(full_logits(params, seeded.tokens_of(length), steps))
        want = references("tiny")[1][f"{case}/{length}"]
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0, err_msg=f"{length} tokens")


@pytest.mark.parametrize("case", quick(QUICK_SAVED, seeded.CASES))
def test_transformers_reads_what_save_writes(tmp_path, case):
    """These are the files with which transformers gives the same logits; tests/references/make.py asks it."""
    files = saved.saved(case, tmp_path)
    assert files == json.loads((seeded.HERE / "saved.json").read_text())[case]
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "saved"))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, strict=True)
    configs = [jshadow.load(tmp_path / name, dtype="float32").config for name in ("theirs", "saved")]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers_on_a_ragged_batch(tmp_path):
    params = jshadow.load(seeded.write_checkpoint(seeded.GREEDY, tmp_path / "m"), dtype="float32")
    outs = jshadow.generate(params, seeded.prompts(), jshadow.Full(), max_new_tokens=seeded.NEW_TOKENS)
    assert [out.tokens for out in outs] == references("tiny")[1]["greedy"].tolist()


# How the references are made


def test_every_case_has_its_references():
    told, arrays = references("tiny")
    assert list(told) == list(json.loads((seeded.HERE / "saved.json").read_text())) == list(seeded.CASES)
    expected = {f"{case}/{length}" for case in seeded.CASES for length in seeded.lengths_of(case)}
    assert set(arrays) == expected | {"greedy", "rope"}


def test_seeded_weights_are_the_same_bits_everywhere():
    """Uniform numbers with a mean and a deviation that depend on the name."""
    value = seeded.tensor("qwen2", "model.layers.0.self_attn.q_proj.bias", (3,))
    assert value.tobytes().hex() == "4e0b143e7f3a08bd26752bbe"
    norm, gemma = (seeded.tensor(case, "model.norm.weight", (4000,)) for case in ("llama", "gemma3"))
    assert (abs(norm.mean() - 1), abs(gemma.mean())) < (0.01, 0.01)
    deviations = [seeded.tensor(case, "a.weight", (4000,)).std() for case in ("llama", "gqa-plain")]
    np.testing.assert_allclose([norm.std(), *deviations], [0.1, 0.2, 0.25], rtol=0.05)


def test_differences_beyond_rounding_are_named():
    def made(ids, x, text, a, n):
        return {"told": {"ids": ids, "x": x, "text": text}, "arrays": {"a": np.full(3, a), "n": np.arange(3) + n}}

    one, other = made([1, 2], 1.0, "a", 1.0, 0), made([1, 3], 1.1, "b", 1.5, 1)
    assert make.differences(one, made([1, 2], 1.0 + 1e-7, "a", 1.0 + 1e-7, 0), 1e-6) == []
    found = make.differences(one, other, 1e-6)
    assert [line.split(":")[0] for line in found] == ["/arrays/a", "/arrays/n", "/told/ids", "/told/text", "/told/x"]
    assert "5.0e-01" in found[0]
    assert make.differences(one, {"told": one["told"], "arrays": {"a": np.ones(4)}}, 1e-6)[0].startswith("/arrays/n:")


def test_without_torch_the_command_that_installs_it_is_told(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert make.main(["tiny", "--check"]) == 2
    first, command = capsys.readouterr().err.splitlines()
    assert first == "torch is not installed. This command installs it:"
    assert command.startswith(f"{sys.executable} -m pip install torch==2.13.0 -r ")


# The real model


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return jshadow.load(str(smollm2_dir), dtype="float32")


@pytest.mark.real
@pytest.mark.parametrize("index", range(len(make.PROMPTS)))
def test_smollm2_s_greedy_text_and_logits_are_those_of_transformers(smollm2, index):
    told, arrays = references("smollm2")
    want = told["prompts"][index]
    out = jshadow.generate(smollm2, make.PROMPTS[index], jshadow.Full(), max_new_tokens=64)
    assert (out.tokens, out.text) == (want["new"], want["text"])
    assert out.report.generated_tokens == len(want["new"])
    ids = want["ids"]
    chat = make.PROMPTS[index]
    if not isinstance(chat, str):
        chat = smollm2.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert smollm2.tokenizer.encode(chat) == ids
    for name, got in seeded.parts_of_many(full_logits(smollm2, np.array([ids]), 0)[0]).items():
        np.testing.assert_allclose(got, arrays[f"{index}/{name}"], atol=2e-3, rtol=0, err_msg=name)


@pytest.mark.real
def test_smollm2_s_perplexity_is_that_of_transformers(smollm2):
    ids = make.texts()["passage"]
    assert len(ids) == 320
    scores = full_logits(smollm2, np.array([ids]), 0)[0, :-1].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    chosen = scores[np.arange(319), ids[1:]] - np.log(np.exp(scores).sum(-1))
    want = references("smollm2")[0]["perplexity"]
    assert abs(np.exp(-chosen.mean()) / want - 1) < 1e-3
