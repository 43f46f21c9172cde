"""Read a document once into a library, then answer several questions about it at once with a serving engine.

python examples/serve_documents.py [MODEL] [--file FILE] [--library DIR] [--question TEXT ...]
"""

import argparse
import tempfile
from pathlib import Path

import jshadow
from jshadow.serving import Engine, Request, RowClass

ROOT = Path(__file__).resolve().parent.parent
FACTS = "The bridge was closed in 1998. It was rebuilt in 2003. The ferry costs 7 crowns. "
QUESTIONS = ["When was the bridge closed?", "When was it rebuilt?", "What does the ferry cost?"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct"))
parser.add_argument("--file", type=Path, help="a .txt, .md or .pdf file; without it, a short report is repeated")
parser.add_argument("--library", type=Path, default=Path(tempfile.gettempdir()) / "jshadow-library")
parser.add_argument("--question", nargs="+", default=QUESTIONS)
parser.add_argument("--max-new-tokens", type=int, default=16)
args = parser.parse_args()

params = jshadow.load(args.model, dtype="float32")
policy = jshadow.ShadowKV(rank=32, budget=256, outlier_chunks=8)
rows = RowClass(prompt=768, room=256, rows=4)  # a group of four rows with 1,024 tokens each
with jshadow.Library(args.library, params, policy, capacity=rows.capacity) as library:
    stored = library.add(FACTS * 20 if args.file is None else args.file)  # reads it only if it is not there yet
    with Engine(params, policy, classes=[rows], library=library) as engine:
        prompts = [library.prompt(stored.key, question) for question in args.question]
        answers = [engine.submit(Request(prompt, max_new_tokens=args.max_new_tokens)) for prompt in prompts]
        for question, answer in zip(args.question, answers, strict=True):
            result = answer.result()
            print(f"{question} {result.text.strip()!r} ({result.report.stored_tokens:,} tokens were stored)")
