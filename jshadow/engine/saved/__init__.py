"""States and learned arrays in files."""
