"""jshadow compared with transformers on the same weights: tiny random Llamas, and SmolLM2 in the slow tests."""

import json

import numpy as np
import pytest
import torch
import transformers
from family_cases import FAMILY_CASES, random_checkpoint

import jshadow

pytestmark = pytest.mark.parity

SHAPES = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mha": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    "one_kv_head_wide": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 40},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
}


def reference(directory, **settings):
    """A tiny random LlamaForCausalLM, saved to directory."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **(
            {
                "vocab_size": 97,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 3,
                "max_position_embeddings": 512,
                "rope_theta": 10000.0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            | settings
        )
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # transformers initializes biases with 0 and matrices with 0.02, which is too small to show a mistake
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name or "bias" in name else 0.25)
    model.save_pretrained(directory)
    return model


def full_logits(params, tokens, steps):
    """Logits [1, S + steps, V] of full attention: the prompt in one prefill, the rest token by token."""
    prompt = tokens[:, : tokens.shape[1] - steps]
    logits, state = jshadow.prefill(
        params, prompt, np.array([prompt.shape[1]]), jshadow.Full(), capacity=tokens.shape[1], logits="all"
    )
    rest = []
    for index in range(prompt.shape[1], tokens.shape[1]):
        out, state = jshadow.decode_step(params, tokens[:, index], state)
        rest.append(np.asarray(out)[:, None])
    return np.concatenate([np.asarray(logits), *rest], axis=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_llama_equals_transformers(tmp_path, shape, variant):
    model = reference(tmp_path, **SHAPES[shape], **VARIANTS[variant])
    params = jshadow.load(str(tmp_path), dtype="float32")
    tokens = np.random.default_rng(1).integers(0, 97, (1, 137))
    with torch.no_grad():
        model(torch.tensor(tokens))
        want = model(torch.tensor(tokens)).logits.numpy()
        exact = model.double()(torch.tensor(tokens)).logits.numpy()
    # In about one of twenty runs, the first comparison of a process differed by 4e-3 in the second half of its tokens,
    # on one of the two sides. So a first forward pass is thrown away, and the results are compared with float64.
    mine = full_logits(params, tokens, steps=4)
    told = f"off float64: transformers {np.abs(want - exact).max():.1e}, jshadow {np.abs(mine - exact).max():.1e}"
    np.testing.assert_allclose(mine, want, atol=1e-4, rtol=0, err_msg=told)


@pytest.mark.parametrize("tokens", [45, 137], ids=["within_the_original_context", "past_it"])
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_every_family_equals_transformers(tmp_path, name, tokens):
    model = random_checkpoint(name, tmp_path)
    params = jshadow.load(str(tmp_path), dtype="float32")
    ids = np.random.default_rng(1).integers(3, 97, (1, tokens))
    with torch.no_grad():
        model(torch.tensor(ids))
        want = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(full_logits(params, ids, steps=4), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_transformers_reads_what_save_writes(tmp_path, name):
    """It reads the same config and the same tensors bit by bit, and gives the same logits."""
    model = random_checkpoint(name, tmp_path / "theirs")
    params = jshadow.load(tmp_path / "theirs", dtype="float32")
    jshadow.save(params, tmp_path / "ours")
    assert jshadow.load(tmp_path / "ours", dtype="float32").config == params.config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    ids = torch.tensor(np.random.default_rng(1).integers(3, 97, (1, 90)))
    with torch.no_grad():
        # an attention factor that a file does not store is computed, and may differ in the last bit
        np.testing.assert_allclose(model(ids).logits.numpy(), again(ids).logits.numpy(), atol=1e-5, rtol=0)


def test_greedy_tokens_equal_transformers_on_a_ragged_batch(tmp_path):
    model = reference(tmp_path, **SHAPES["gqa"])
    params = jshadow.load(str(tmp_path), dtype="float32")
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 97, size).tolist() for size in (5, 33, 64)]
    outs = jshadow.generate(params, prompts, jshadow.Full(), max_new_tokens=12)
    for prompt, out in zip(prompts, outs, strict=True):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        assert out.tokens == want


# The real model

PROMPTS = (
    [{"role": "user", "content": "What is the capital of France, and which river runs through it?"}],
    [{"role": "user", "content": "Write a short poem about the sea."}],
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    "The quick brown fox jumps over the lazy dog. Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    """SmolLM2 in float32: jshadow's Params and transformers' model, from one directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    return jshadow.load(str(smollm2_dir), dtype="float32"), model


@pytest.mark.real
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_smollm2_greedy_text_equals_transformers(smollm2, index):
    params, model = smollm2
    out = jshadow.generate(params, PROMPTS[index], jshadow.Full(), max_new_tokens=64)
    tokenizer = params.tokenizer
    ids = PROMPTS[index]
    if isinstance(ids, str):
        ids = tokenizer.encode(ids)
    else:
        ids = tokenizer.encode(tokenizer.apply_chat_template(ids, tokenize=False, add_generation_prompt=True))
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :]
        want = model(torch.tensor([ids])).logits.numpy()
    assert out.text == tokenizer.decode(made, skip_special_tokens=True)
    assert out.report.generated_tokens == len(made)
    got, _ = jshadow.prefill(
        params, np.array([ids]), np.array([len(ids)]), jshadow.Full(), capacity=len(ids), logits="all"
    )
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-3, rtol=0)


@pytest.mark.real
def test_smollm2_perplexity_equals_transformers(smollm2):
    from pydoc_data import topics

    params, model = smollm2
    ids = params.tokenizer.encode(topics.topics["assert"] + topics.topics["binary"])[:320]
    assert len(ids) == 320
    tokens = np.array([ids])
    logits, _ = jshadow.prefill(params, tokens, np.array([320]), jshadow.Full(), capacity=320, logits="all")
    with torch.no_grad():
        want = float(torch.exp(model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss))
    scores = np.asarray(logits, np.float64)[0, :-1]
    scores -= scores.max(-1, keepdims=True)
    chosen = scores[np.arange(319), ids[1:]] - np.log(np.exp(scores).sum(-1))
    assert abs(np.exp(-chosen.mean()) / want - 1) < 1e-3
    print(json.dumps({"perplexity": float(np.exp(-chosen.mean())), "transformers": want}))
