"""ShadowKV and ShadowKV+ (Sun et al. 2024, arXiv 2410.21465)."""

from jshadow.policies.shadowkv.plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.shadowkv.policy import ShadowKV as ShadowKV
