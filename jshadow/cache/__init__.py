"""The KV cache of a batch of requests: its static description, its state, and the part of it in host memory."""
