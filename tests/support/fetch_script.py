"""checkpoints/fetch_smollm2.py as a module."""

import importlib.util
from pathlib import Path
from typing import Any


def import_fetch_script() -> Any:
    """checkpoints/fetch_smollm2.py as a module."""
    path = Path(__file__).parents[2] / "checkpoints" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
