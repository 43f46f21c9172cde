"""Times of decode steps and prefills on this machine, with dense baselines and the peak rates of the machine.

A benchmark compiles, warms up, and returns the median, the minimum and the maximum of its repeats. If torch and
transformers are installed, they are measured in the same run.
"""

from jshadow.evaluation.speed.dense import bench_baselines as bench_baselines
from jshadow.evaluation.speed.layer import Shape as Shape
from jshadow.evaluation.speed.layer import bench_layer as bench_layer
from jshadow.evaluation.speed.model import bench_model as bench_model
from jshadow.evaluation.speed.request import Request as Request
from jshadow.evaluation.speed.stages import bench_stages as bench_stages
from jshadow.evaluation.speed.timing import ceilings as ceilings
