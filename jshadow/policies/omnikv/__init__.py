"""OmniKV: filter layers choose tokens for other layers (ICLR 2025)."""

from jshadow.policies.omnikv.policy import OmniKV as OmniKV
