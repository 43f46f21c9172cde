"""One model over several devices and processes: a step on each device, and how processes meet and agree."""
