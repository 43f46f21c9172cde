"""One model over several devices: the step and the compression of a prompt on each device, and where arrays lie."""
