"""Codes of a prompt's keys before RoPE: what ShadowKV keeps of them on the device, and rebuilds chunks from.

`lowrank` is the paper's, `transform` spends the same bits on more columns, and `exact` loses nothing. To add one: a
`KeyCodec` in a file of its own, a settings record in `shadowkv/settings.py`, and a case in
tests/policies/shadowkv/test_key_codecs.py.
"""

from jshadow.policies.shadowkv.key_codecs.base import KeyCode as KeyCode
from jshadow.policies.shadowkv.key_codecs.base import KeyCodec as KeyCodec
from jshadow.policies.shadowkv.key_codecs.base import Sizes as Sizes
from jshadow.policies.shadowkv.key_codecs.base import by_head as by_head
from jshadow.policies.shadowkv.key_codecs.base import by_token as by_token
from jshadow.policies.shadowkv.key_codecs.base import squared_error as squared_error
from jshadow.policies.shadowkv.key_codecs.exact import ExactCodec as ExactCodec
from jshadow.policies.shadowkv.key_codecs.lowrank import LowRankCodec as LowRankCodec
from jshadow.policies.shadowkv.key_codecs.lowrank import usual_rank as usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import Profile as Profile
from jshadow.policies.shadowkv.key_codecs.transform import TransformCodec as TransformCodec
from jshadow.policies.shadowkv.key_codecs.transform import usual_profile as usual_profile
