"""The bytes of states and the plans of GPUs, computed before anything runs."""
