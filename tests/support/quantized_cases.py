"""What quantized weights stand for, computed in NumPy by the definition of their layout."""

import numpy as np


def meant(record):
    """The numbers of a record ("kernel", "kernel_scale", "kernel_zero"), float64 [D, F] or [E, D, F]."""
    record = {name: np.asarray(part) for name, part in record.items()}
    codes, scale = record["kernel"], record["kernel_scale"].astype(np.float64)
    if codes.ndim == 3:
        return np.stack([meant({name: part[expert] for name, part in record.items()}) for expert in range(len(codes))])
    if "kernel_zero" not in record:
        return codes.astype(np.float64) * scale
    group = 2 * codes.shape[0] // scale.shape[0]
    out = np.zeros((2 * codes.shape[0], codes.shape[1]))
    for d in range(len(out)):
        which, place = divmod(d, group)
        byte = codes[which * group // 2 + place % (group // 2)]
        code = byte >> 4 if place >= group // 2 else byte & 15
        out[d] = code * scale[which] + record["kernel_zero"][which].astype(np.float64)
    return out
