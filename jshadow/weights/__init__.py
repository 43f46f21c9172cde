"""Loading, saving and converting model weights."""
