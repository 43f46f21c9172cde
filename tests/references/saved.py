"""Write saved.json: the JSON files that jshadow saves for each case. make.py has transformers read them."""

import json
import tempfile
from pathlib import Path
from typing import Any

import seeded

import jshadow


def saved(case: str, folder: Path) -> dict[str, Any]:
    """The JSON files that `save` writes for a case, by name. The checkpoint is in folder/saved."""
    params = jshadow.load(seeded.write_checkpoint(case, folder / "theirs"), dtype="float32")
    jshadow.save(params, folder / "saved")
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "saved").glob("*.json"))}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        lines = [f"{json.dumps(case)}: {json.dumps(saved(case, Path(scratch, case)))}" for case in seeded.CASES]
    (seeded.HERE / "saved.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
