"""What the tests of the command line ask, so that they share the compiled programs: one prompt, and two settings."""

TEXT = "a document " * 20  # 220 tokens of the tiny model
CAPACITY = ["--capacity", "400"]
# Few settings, all with the same number of new tokens and in float32.
LENGTH = ["--max-new-tokens", "4", "--dtype", "float32"]
SMALL = ["--set", "rank=8", "--set", "budget=64", "--set", "outlier_chunks=2", "--fetch", "device_put"]
# Rows in host memory too, and half of the time to compile.
HALF = {"budget": 32, "unit": 8, "recent": 8, "dense_layers": 0}
QUEST = ["--policy", "quest", "--fetch", "device_put", *(f"--set={name}={value}" for name, value in HALF.items())]
FULL = ["--policy", "full"]
