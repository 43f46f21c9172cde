"""Prefill one document once, then ask several questions, each on a fork of the document's KV state.

python examples/shared_document.py [MODEL] [--file FILE] [--question TEXT ...]
"""

import argparse
from pathlib import Path

import jshadow

ROOT = Path(__file__).resolve().parent.parent
FACTS = "The bridge was closed in 1998. It was rebuilt in 2003. The ferry costs 7 crowns. "
QUESTIONS = ["When was the bridge closed?", "When was it rebuilt?", "What does the ferry cost?"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct"))
parser.add_argument("--file", type=Path, help="the document; without it, a short report is repeated")
parser.add_argument("--question", nargs="+", default=QUESTIONS)
parser.add_argument("--max-new-tokens", type=int, default=16)
args = parser.parse_args()

params = jshadow.load(args.model, dtype="float32")
document = FACTS * 20 if args.file is None else args.file.read_text(encoding="utf-8")
chat = [{"role": "user", "content": f"Here is a report.\n\n{document}\n\nI will ask you about it."}]
capacity = len(params.tokenizer.encode(document)) + 256  # room for a question and its answer

policy = jshadow.ShadowKV(rank=32, budget=256, outlier_chunks=8)
read = jshadow.generate(params, chat, policy, max_new_tokens=0, capacity=capacity)  # prefill only
print(f"document: {int(read.state.lengths[0]):,} tokens, {read.report.prefill_seconds:.1f} s")

for question in args.question:
    turn = [{"role": "user", "content": question}]
    out = jshadow.generate(params, turn, state=read.state.fork(), max_new_tokens=args.max_new_tokens)
    print(f"{question} {out.text.strip()!r}")
