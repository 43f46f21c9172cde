"""The windows that a number of tokens after a prompt needs. `jshadow.cache.row_room` computes them."""

from jshadow.cache.row_room import with_room as with_room
