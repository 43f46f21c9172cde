"""One model over several devices and processes."""
