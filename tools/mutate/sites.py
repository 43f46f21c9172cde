"""Places of the library where one small change makes it wrong, and a seeded choice among them.

A mutant is named by its file, function, kind and text, and not by a line number. So the same list can be applied to
another commit, as long as the function still has that text.
"""

import ast
import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Which tests are the tests of a folder of the library. The laws run every policy, so they belong to several rooms.
ROOMS = {
    "jshadow/cache": ("tests/cache", "tests/laws"),
    "jshadow/cli": ("tests/cli",),
    "jshadow/engine": ("tests/engine", "tests/laws"),
    "jshadow/evaluation": ("tests/evaluation", "tests/laws"),
    "jshadow/library": ("tests/library",),
    "jshadow/models": ("tests/models", "tests/ops"),
    "jshadow/ops": ("tests/ops", "tests/kernels", "tests/laws"),
    "jshadow/planner": ("tests/planner",),
    "jshadow/policies": ("tests/policies", "tests/laws"),
    "jshadow/serving": ("tests/serving",),
    "jshadow/weights": ("tests/weights", "tests/models"),
    "jshadow": ("tests/engine", "tests/cli"),  # files beside the folders
    "pallas_kernels": ("tests/kernels", "tests/cache", "tests/policies"),
}
LEAST = 4  # mutants of each room; the others are drawn in proportion to the places
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: the file, from the root of the repository.
        function: the qualified name of the function or class, or "" for the module.
        kind: what is wrong then.
        before: the text that is replaced.
        after: the text in its place.
        place: which of the equal texts of the function is meant, from 0.
    """

    path: str
    function: str
    kind: str
    before: str
    after: str
    place: int

    @property
    def room(self) -> str:
        """The key in ROOMS."""
        folder = "/".join(self.path.split("/")[:2])
        return next(room for room in (folder, self.path.split("/")[0]) if room in ROOMS)

    def __str__(self) -> str:
        """One line that names the place."""
        return f"{self.path} {self.function}: {self.kind}: `{_short(self.before)}` -> `{_short(self.after)}`"

    def applied(self, text: str) -> str:
        """Return the file with the change.

        Raises:
            LookupError: the function does not have that text any more.
        """
        found = [start for mutant, start in _places(self.path, text) if mutant == self]
        if not found:
            raise LookupError(f"{self} does not exist in this tree")
        return text[: found[0]] + self.after + text[found[0] + len(self.before) :]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def chosen(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return mutants by a seed: at least LEAST of each room, the rest in proportion, kinds in turn within a room."""
    by_room: defaultdict[str, list[Mutant]] = defaultdict(list)
    for top in ("jshadow", "pallas_kernels"):
        for path in sorted((root / top).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            for mutant, _ in _places(place, path.read_text()):
                by_room[mutant.room].append(mutant)
    total, spare = sum(map(len, by_room.values())), count - LEAST * len(by_room)
    wanted = {room: LEAST + spare * len(found) // total for room, found in by_room.items()}
    for room in sorted(by_room, key=lambda room: -len(by_room[room]))[: count - sum(wanted.values())]:
        wanted[room] += 1
    rng = random.Random(seed)
    picked: list[Mutant] = []
    for room, found in sorted(by_room.items()):
        kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
        for mutant in found:
            kinds[mutant.kind].append(mutant)
        turns = sorted(kinds)
        rng.shuffle(turns)
        for turn in range(wanted[room]):
            pool = kinds[turns[turn % len(turns)]] or found
            picked.append(pool.pop(rng.randrange(len(pool))))
    return picked


def _places(path: str, text: str) -> Iterator[tuple[Mutant, int]]:
    """Yield every mutant of a file, and where its text begins."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = text.encode()

    def span(first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        last = last or first
        begin = starts[first.lineno - 1] + first.col_offset  # type: ignore[attr-defined]
        return begin, starts[last.end_lineno - 1] + last.end_col_offset  # type: ignore[attr-defined]

    seen: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for name, node in _walk(ast.parse(text)):
        for kind, (begin, end), after in _changes(node, raw, span):
            before = raw[begin:end].decode()
            key = (name, kind, before)
            yield Mutant(path, name, kind, before, after, seen[key]), len(raw[:begin].decode())
            seen[key] += 1


def _walk(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of functions with the qualified name of the function, without annotations."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            inner = name
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                inner = f"{name}.{node.name}".lstrip(".")
            if inner:
                yield inner, node
            yield from _walk(node, inner)


def _changes(node: ast.AST, raw: bytes, span) -> Iterator[tuple[str, tuple[int, int], str]]:  # type: ignore[no-untyped-def]
    """Yield (kind, span in bytes, new text) of the changes of one node."""

    def source(part: ast.AST) -> str:
        begin, end = span(part)
        return raw[begin:end].decode()

    if isinstance(node, ast.BinOp) and type(node.op) in BINARY and not _is_text(node):
        yield "sign", span(node), f"({source(node.left)}) {BINARY[type(node.op)]} ({source(node.right)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        sign = COMPARED[type(node.ops[0])]
        yield "bound", span(node), f"({source(node.left)}) {sign} ({source(node.comparators[0])})"
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 < node.value < 1000:
        yield "off by one", span(node), str(node.value + 1)
    if isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body):
        yield "skipped check", span(node.test), "False"
    if isinstance(node, ast.Call):
        yield from _changed_call(node, source, span)


def _changed_call(node: ast.Call, source, span) -> Iterator[tuple[str, tuple[int, int], str]]:  # type: ignore[no-untyped-def]
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "where" and len(node.args) == 3:
        module = source(node.func.value) if isinstance(node.func, ast.Attribute) else "jnp"
        shape = f"{module}.shape({source(node)})"
        yield "dropped mask", span(node), f"{module}.broadcast_to({source(node.args[1])}, {shape})"
    for keyword in node.keywords:
        if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant) and type(keyword.value.value) is int:
            yield "wrong axis", span(keyword.value), str(1 if keyword.value.value == 0 else 0)
    plain = [argument for argument in node.args if isinstance(argument, ast.Name | ast.Attribute)]
    if len(plain) == len(node.args) == 2 and called != "isinstance":
        if source(plain[0]) == source(plain[1]) or source(plain[0]) == "self":
            return
        yield "swapped arguments", span(*plain), f"{source(plain[1])}, {source(plain[0])}"


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operation is one of texts or lists: another sign would be a TypeError and not a wrong result."""
    kinds = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(
        isinstance(part, kinds) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )
