"""What `make gpu` measures and checks on an NVIDIA GPU."""
