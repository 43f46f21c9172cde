"""The table of kernels of a profile."""

import pytest
from gpu.kernel_times import kernels
from gpu.runner import NotHere
from jax.profiler import ProfileData

GPU = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "fusion" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyH2D" } }
  lines {
    name: "Stream #1(Compute)"
    events { metadata_id: 1 duration_ps: 2000000 }
    events { metadata_id: 1 duration_ps: 3000000 }
  }
  lines { name: "Stream #2(MemcpyH2D)" events { metadata_id: 2 duration_ps: 9000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 7000000 } }
}
planes {
  name: "/host:CPU"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  event_metadata { key: 1 value { id: 1 name: "dot" } }
  event_metadata { key: 2 value { id: 2 name: "python" } }
  lines {
    events { metadata_id: 1 duration_ps: 4000000 stats { metadata_id: 1 str_value: "dot" } }
    events { metadata_id: 2 duration_ps: 5000000 }
  }
}
"""


def rows(text, gpu):
    """Return the table of a profile as tuples."""
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    return [(row["name"], row["count"], round(row["seconds"] * 1e6, 3)) for row in kernels(data, gpu)]


def test_kernels_of_a_gpu_are_the_events_of_its_streams():
    assert rows(GPU, gpu=True) == [("MemcpyH2D", 1, 9.0), ("fusion", 2, 5.0)]


def test_without_a_gpu_the_operations_of_xla_are_taken():
    assert rows(GPU, gpu=False) == [("dot", 1, 4.0)]


def test_a_profile_without_kernels_says_what_it_has():
    with pytest.raises(NotHere, match="only \\['/host:CPU '\\]"):
        rows(GPU[GPU.index("planes {", 9) :], gpu=True)
