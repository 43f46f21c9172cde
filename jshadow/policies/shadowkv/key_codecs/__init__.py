"""Codes of a prompt's keys before RoPE, which ShadowKV stores on the device and rebuilds chunks from.

`lowrank` is the paper's code. `transform` spends the same bits on more columns. `exact` is lossless. `from_values`
needs no code, in models whose values are their keys. `TokenCodec`
serves only the later tokens of ShadowKV+. A new code is a `KeyCodec` and a subclass of `shadowkv.Keys`, in a file of
its own (docs/key_codes.md).
"""

from jshadow.policies.shadowkv.key_codecs.base import KeyCode as KeyCode
from jshadow.policies.shadowkv.key_codecs.base import KeyCodec as KeyCodec
from jshadow.policies.shadowkv.key_codecs.base import Sizes as Sizes
from jshadow.policies.shadowkv.key_codecs.base import by_head as by_head
from jshadow.policies.shadowkv.key_codecs.base import by_token as by_token
from jshadow.policies.shadowkv.key_codecs.base import squared_error as squared_error
from jshadow.policies.shadowkv.key_codecs.lowrank import LowRankCodec as LowRankCodec
from jshadow.policies.shadowkv.key_codecs.lowrank import usual_rank as usual_rank
from jshadow.policies.shadowkv.key_codecs.tokens import ExactCodec as ExactCodec
from jshadow.policies.shadowkv.key_codecs.tokens import TokenCodec as TokenCodec
from jshadow.policies.shadowkv.key_codecs.transform import Profile as Profile
from jshadow.policies.shadowkv.key_codecs.transform import TransformCodec as TransformCodec
from jshadow.policies.shadowkv.key_codecs.transform import usual_profile as usual_profile
from jshadow.policies.shadowkv.key_codecs.values import ValueCodec as ValueCodec
