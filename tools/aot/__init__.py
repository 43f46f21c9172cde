"""The compiled programs of absent GPUs: their bytes, kernels and machine code. `make aot` runs it."""
