"""Pure functions on arrays: attention, RoPE, packing of low-bit numbers, and moves between layouts."""
