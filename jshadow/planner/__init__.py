"""The bytes of states, and what a GPU can serve. Everything is computed without allocating or running anything."""
