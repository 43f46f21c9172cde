"""Filling a text to an exact number of tokens."""

from tiny_text import byte_tokenizer

from jshadow.evaluation.tasks import filling

TOKENIZER = byte_tokenizer()


def test_filling_is_exact_where_every_byte_is_a_token() -> None:
    for room in range(200, 260):
        text = filling.fill(TOKENIZER, lambda count, padding: "word, " * count + padding, room, 0)
        assert len(text) == room


def test_largest_finds_the_cut_among_uneven_pieces() -> None:
    sizes = [(i * i * 7919) % 97 + 1 for i in range(3000)]
    for room in (5, 100, 5000, 90_000):
        found = filling.largest(lambda count: sum(sizes[:count]), 0, room)
        assert sum(sizes[:found]) <= room < sum(sizes[: found + 1])
