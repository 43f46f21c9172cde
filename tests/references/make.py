"""Make the committed reference arrays: what transformers and kvpress answer on the checkpoints of the tests.

`make references` runs this in environments of its own, see README.md. jshadow is not imported.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import seeded

HERE = Path(__file__).resolve().parent
# The most that two makings of a part may differ by: they round differently.
ROUNDING = {"tiny": 2e-5, "smollm2": 5e-4, "kvpress": 0.0}
Made = dict[str, dict[str, Any]]  # "told" becomes a JSON file, and "arrays" a file of arrays


# Tiny checkpoints


def described(case: str, folder: Path) -> dict[str, Any]:
    """What transformers writes for a case: its JSON files, and the shapes of its tensors by name."""
    import transformers
    from safetensors.numpy import load_file

    model_type, settings = seeded.CASES[case]
    told = {key: value for key, value in (seeded.BASE | settings).items() if value is not None or key not in BASE_KEYS}
    config = transformers.AutoConfig.for_model(model_type, **told)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    found: dict[str, dict[str, list[int]]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        first, layer, rest = name.partition(".layers.")
        short = f"{first}{layer}*.{rest.split('.', 1)[1]}" if layer else name
        found.setdefault(short, {})[name] = list(value.shape)
    shapes: dict[str, list[int]] = {}
    for short, named in found.items():  # a name that only some layers have, or in several shapes, is not shortened
        alike = len({str(shape) for shape in named.values()}) == 1
        everywhere = alike and ("*" not in short or len(named) == config.num_hidden_layers)
        shapes |= {short: next(iter(named.values()))} if everywhere else named
    files = sorted(path.name for path in folder.glob("*.json"))
    return {name: json.loads((folder / name).read_text()) for name in files} | {"tensors": dict(sorted(shapes.items()))}


BASE_KEYS = frozenset(seeded.BASE)


def model_of(folder: Path) -> Any:
    """transformers' model of a folder, with all tensors from its file."""
    import torch
    import transformers

    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    if any(found.values()):
        raise ValueError(f"{folder.name}: {found}")
    return model.eval()


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits [1, T, V] of a model."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def tiny() -> Made:
    """Logits of every case in float64, tokens of one of them, and frequencies of RoPE."""
    import torch

    torch.manual_seed(0)
    told, arrays = {}, {}
    saved = json.loads((HERE / "saved.json").read_text()) if (HERE / "saved.json").exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in seeded.CASES:
            told[case] = described(case, Path(scratch, case, "first"))
            folder = seeded.write_checkpoint(case, Path(scratch, case, "seeded"), told[case])
            again = told[case] | saved.get(case, {})
            ours = model_of(seeded.write_checkpoint(case, Path(scratch, case, "saved"), again))
            model = model_of(folder)
            for length in seeded.lengths_of(case):
                ids = seeded.tokens_of(length)
                single = logits_of(model, ids)
                wide = logits_of(copy.deepcopy(model).double(), ids)
                near(f"{case}: float32 and float64", single, wide, 1e-4)
                # An attention factor that a file does not store is computed, and may differ in the last bit.
                near(f"{case}: what jshadow saves", logits_of(ours, ids), single, 1e-5)
                arrays[f"{case}/{length}"] = seeded.part_of(wide)
            if case == seeded.GREEDY:
                arrays["greedy"] = np.array([continued(model, prompt) for prompt in seeded.prompts()])
    arrays["rope"] = np.stack([frequencies(**settings) for settings in seeded.ROPES])
    return {"told": told, "arrays": arrays}


def near(name: str, one: np.ndarray, other: np.ndarray, most: float) -> None:
    """Raise ValueError if arrays differ by more than `most`."""
    if (off := np.abs(one - other).max()) > most:
        raise ValueError(f"{name} differ by {off:.1e}, more than {most:.0e}")


def continued(model: Any, prompt: list[int]) -> list[int]:
    """The greedy tokens after a prompt."""
    import torch

    out = model.generate(torch.tensor([prompt]), max_new_tokens=seeded.NEW_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


def frequencies(
    theta: float = 10000.0,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_context: int = 8192,
) -> np.ndarray:
    """transformers' frequencies of a rotation of 64 columns."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        parameters |= {
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=parameters, max_position_embeddings=131072
    )
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)[0].numpy()
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].numpy()


# SmolLM2

PROMPTS: tuple[Any, ...] = (
    [{"role": "user", "content": "What is the capital of France, and which river runs through it?"}],
    [{"role": "user", "content": "Write a short poem about the sea."}],
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    "The quick brown fox jumps over the lazy dog. Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
)


def texts() -> dict[str, list[int]]:
    """Token ids of texts, which were written once."""
    return json.loads((HERE / "texts.json").read_text())


def smollm2(folder: Path) -> Made:
    """Text, logits and perplexity of the real model, in float32."""
    import torch
    from transformers import AutoTokenizer

    model, tokenizer, told, arrays = model_of(folder), AutoTokenizer.from_pretrained(folder), [], {}
    for index, prompt in enumerate(PROMPTS):
        chat = prompt if isinstance(prompt, str) else None
        if chat is None:
            chat = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(chat)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
        text = tokenizer.decode(out, skip_special_tokens=True)
        told.append({"prompt": prompt, "ids": ids, "new": out, "text": text})
        logits = logits_of(model, np.array([ids]))[0]
        arrays |= {f"{index}/{name}": part for name, part in seeded.parts_of_many(logits).items()}
    passage = torch.tensor([texts()["passage"]])
    with torch.no_grad():
        perplexity = float(torch.exp(model(passage, labels=passage).loss))
    return {"told": {"prompts": told, "perplexity": perplexity}, "arrays": arrays}


# The committed files


def committed(part: str) -> Made:
    """The committed values of a part."""
    told = HERE / f"{part}.json"
    with np.load(HERE / f"{part}.npz") as arrays:
        return {"told": json.loads(told.read_text()) if told.exists() else {}, "arrays": dict(arrays)}


def differences(one: Any, other: Any, most: float, name: str = "") -> list[str]:
    """Where two values differ: numbers by more than `most`, relative to 1 or their size, and all else at all."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = sorted({*one, *other})
        missing = [f"{name}/{key}: only in one of both" for key in keys if key not in one or key not in other]
        both = [key for key in keys if key in one and key in other]
        return missing + [line for key in both for line in differences(one[key], other[key], most, f"{name}/{key}")]
    if isinstance(one, np.ndarray) and one.shape == np.shape(other) and one.dtype.kind == "f":
        one, other = one.astype(np.float64), np.asarray(other, np.float64)
        off = (np.abs(one - other) / np.maximum(1, np.abs(one))).max(initial=0)
        return [] if off <= most else [f"{name}: {off:.1e}, and rounding is at most {most:.0e}"]
    if isinstance(one, float) and isinstance(other, float):
        return differences(np.array(one), np.array(other), most, name)
    same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return [] if same else [f"{name}: {one!r:.60} is not {other!r:.60}"]


def write(part: str, made: Made) -> None:
    """Replace the files of a part."""
    if made["told"]:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in made["told"].items())
        (HERE / f"{part}.json").write_text(f"{{\n{lines}\n}}\n")
    np.savez_compressed(HERE / f"{part}.npz", **made["arrays"])


def main(arguments: list[str] | None = None) -> int:
    """Make one part, or compare it. Returns the exit status: 1 after a difference, 2 if something is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(ROUNDING))
    parser.add_argument("--model", type=Path, help="folder of the converted SmolLM2 (checkpoints/fetch_smollm2.py)")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, and write nothing")
    chosen = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        needed = HERE / ("requirements-kvpress.txt" if chosen.part == "kvpress" else "requirements.txt")
        command = f"{sys.executable} -m pip install torch==2.13.0 -r {needed}"
        print(f"torch is not installed. This command installs it:\n{command}", file=sys.stderr)
        return 2
    from transformers.utils import logging

    torch.set_num_threads(2)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if chosen.part != "tiny" and not (chosen.model and (chosen.model / "config.json").exists()):
        print(f"{chosen.part} needs --model FOLDER, that of checkpoints/fetch_smollm2.py", file=sys.stderr)
        return 2
    if chosen.part == "tiny":
        made = tiny()
    elif chosen.part == "smollm2":
        made = smollm2(chosen.model)
    else:
        from kvpress_kept import kvpress

        made = kvpress(chosen.model, texts())
    there = (HERE / f"{chosen.part}.npz").exists()
    found = differences(committed(chosen.part), made, ROUNDING[chosen.part]) if there else [": has no file yet"]
    for line in found:
        print(f"{chosen.part}{line}", file=sys.stderr)
    if chosen.check:
        print(f"{chosen.part}: {len(found)} values differ" if found else f"{chosen.part}: as committed")
        return 1 if found else 0
    if found:
        write(chosen.part, made)
    print(f"{chosen.part}: written" if found else f"{chosen.part}: the same but for rounding, not written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
