"""Random JSON schemas that some value fits: nested objects and arrays, bounds, patterns, alternatives, references."""

import numpy as np

PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][0-9]{2}$", "^(ab|cd)+x?$", r"^\d{4}-\d{2}$")
NAMES = ("name", "size", "a b", 'quote"', "größe", "x_1", "back\\slash", "t")
WORDS = ("red", "green", 'a "b"', "", "ü", "line\nend", 1, -2.5, True, None)


def random_schema(seed: int) -> dict:
    """A schema, with definitions that it refers to."""
    rng = np.random.default_rng(seed)
    parts = {f"part{index}": _schema(rng, 1, ()) for index in range(2)}
    return _schema(rng, 3, tuple(parts), top=True) | {"$defs": parts}


def _schema(rng: np.random.Generator, depth: int, parts: tuple[str, ...], top: bool = False) -> dict:
    kinds = [_integer, _number, _string, _pattern, _enum, _const, _bool]
    if depth and (top or rng.random() < 0.6):
        kinds = [_object, _object, _array, _any_of]
    elif parts and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(parts)}"}
    return kinds[int(rng.integers(len(kinds)))](rng, depth, parts)


def _object(rng: np.random.Generator, depth: int, parts: tuple[str, ...]) -> dict:
    names = [NAMES[place] for place in rng.permutation(len(NAMES))[: rng.integers(4)]]
    properties = {name: _schema(rng, depth - 1, parts) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: np.random.Generator, depth: int, parts: tuple[str, ...]) -> dict:
    least = int(rng.integers(3))
    more = {"minItems": least, "maxItems": least + int(rng.integers(3))}
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_schema(rng, depth - 1, parts)], "items": False, "minItems": 1}
    return {"type": "array", "items": _schema(rng, depth - 1, parts)} | more


def _any_of(rng: np.random.Generator, depth: int, parts: tuple[str, ...]) -> dict:
    return {"anyOf": [_schema(rng, depth - 1, parts) for _ in range(rng.integers(1, 4))]}


def _integer(rng: np.random.Generator, *_: object) -> dict:
    low = int(rng.integers(-200, 200))
    names = ("minimum", "maximum") if rng.random() < 0.5 else ("exclusiveMinimum", "exclusiveMaximum")
    return {"type": "integer", names[0]: low, names[1]: low + 2 + int(rng.integers(300))}


def _number(rng: np.random.Generator, *_: object) -> dict:
    low = round(float(rng.uniform(-9, 9)), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + float(rng.uniform(0.5, 20)), 2)}


def _string(rng: np.random.Generator, *_: object) -> dict:
    least = int(rng.integers(4))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(6))}


def _pattern(rng: np.random.Generator, *_: object) -> dict:
    return {"type": "string", "pattern": str(rng.choice(PATTERNS))}


def _enum(rng: np.random.Generator, *_: object) -> dict:
    return {"enum": [WORDS[place] for place in rng.permutation(len(WORDS))[: rng.integers(1, 4)]]}


def _const(rng: np.random.Generator, *_: object) -> dict:
    return {"const": WORDS[int(rng.integers(len(WORDS)))]}


def _bool(rng: np.random.Generator, *_: object) -> dict:
    return {"type": ["boolean", "null"] if rng.random() < 0.3 else "boolean"}
