"""Decode a batch of prompts of different lengths with a loop of your own.

python examples/batch_decode.py [MODEL] [--steps N]
"""

import argparse
from pathlib import Path

import numpy as np

import jshadow

ROOT = Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct"))
parser.add_argument("--steps", type=int, default=16, help="tokens to decode for each prompt")
args = parser.parse_args()

params = jshadow.load(args.model, dtype="float32")
texts = ["The three primary colors are", "def add(a, b):\n    return", "Water boils at"]
prompts = [params.tokenizer.encode(text) for text in texts]
lengths = np.array([len(prompt) for prompt in prompts])
tokens = np.zeros((len(prompts), lengths.max()), np.int32)
for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt  # padding is on the right

policy = jshadow.ShadowKV(rank=32, budget=64)
logits, state = jshadow.prefill(params, tokens, lengths, policy, capacity=128, fetch="device_put")
answers = np.zeros((len(prompts), args.steps), np.int32)
for step in range(args.steps):
    answers[:, step] = logits.argmax(-1)  # greedy; put your own sampling here
    logits, state = jshadow.decode_step(params, answers[:, step], state)  # the state passed in is consumed
for text, answer in zip(texts, answers, strict=True):
    print(repr(text + params.tokenizer.decode(answer)))
