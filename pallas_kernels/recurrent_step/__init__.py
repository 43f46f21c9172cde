"""The op that reads one new token into the state of a recurrent layer. It is a kernel alone."""

import jax

from pallas_kernels.recurrent_step import kernel
from pallas_kernels.recurrent_step.operands import HeldRows as HeldRows
from pallas_kernels.recurrent_step.operands import NextToken as NextToken
from pallas_kernels.recurrent_step.operands import check


def recurrent_step(
    held: HeldRows, new: NextToken, *, biases: bool = False, corrects: bool = True, interpret: bool = False
) -> tuple[jax.Array, HeldRows]:
    """Convolve one new token of each row, and read it into the state of each value head, by the gated delta rule.

    The rule is that of Gated DeltaNet (arXiv 2412.06464, section 3), or of Mamba-2 (arXiv 2405.21060, section 6). With
    the inputs q, k and v after the convolution and silu, rounded to their dtype, it is

        S = exp(log_decay) S,  u = beta (v - S^T k),  S = S + k u^T,  o = S^T q

    It is computed in float32. S itself does not change: k, u and log_decay become a pending token in the ring, and the
    oldest `folds` pending tokens are folded into S. S is read once, and written only in rows that fold. Value head h
    uses key head h // (n_v / n_k). Donated arrays are changed in place.

    Args:
        held: what the layer holds.
        new: the new token of each row.
        biases: whether the convolution has biases.
        corrects: whether queries and keys are normalized, and queries then divided by sqrt(d_k), and a token replaces
            what S holds for its key. Otherwise u is beta v, and they are taken as they are.
        interpret: whether JAX's interpreter runs the kernel. It does so on any machine.

    Returns:
        The outputs o plus skip times v, float32 [B, 1, n_v, d_v], and what the layer holds after the token.

    Raises:
        ValueError: a shape or a dtype is wrong.
        NotImplementedError: there are more tokens than one, a width or the number of slots is not a power of two from
            16 on, a width is more than 256, the ring has more than 64 slots, or a dtype is not float32, bfloat16 or
            float16.
    """
    if new.q.shape[1] != 1:
        raise NotImplementedError(f"recurrent_step: the kernel takes one token, got {new.q.shape[1]}")
    check(held, new)
    return kernel.recurrent_step(held, new, biases, corrects, interpret)
