"""Ask one question about a long text with ShadowKV, and print what the KV cache took.

python examples/generate_long_prompt.py [MODEL] [--file FILE] [--question TEXT] [--tokens N]
"""

import argparse
from pathlib import Path

import jshadow

ROOT = Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct"))
parser.add_argument("--file", type=Path, default=ROOT / "LICENSE", help="the long text")
parser.add_argument("--question", default="Which license is this?")
parser.add_argument("--tokens", type=int, default=4096, help="the text is cut after this many tokens")
parser.add_argument("--max-new-tokens", type=int, default=32)
args = parser.parse_args()

params = jshadow.load(args.model, dtype="float32")
text = args.file.read_text(encoding="utf-8")
text = params.tokenizer.decode(params.tokenizer.encode(text, truncation=True, max_length=args.tokens))
chat = [{"role": "user", "content": f"{text}\n\n{args.question}"}]

# rank: columns of the low-rank keys. budget: tokens whose values each step fetches from host memory.
policy = jshadow.ShadowKV(rank=32, budget=256)
out = jshadow.generate(params, chat, policy, max_new_tokens=args.max_new_tokens, fetch="device_put")
print(out.text.strip())

report = out.report
if report.fallback is not None:  # the text is too short for the policy, so a dense cache was used
    print("fallback:", report.fallback)
print(f"KV cache: {report.device_bytes:,} bytes on the device, {report.host_bytes:,} in host memory")
print(f"full attention: {report.full_bytes:,} bytes on the device")
