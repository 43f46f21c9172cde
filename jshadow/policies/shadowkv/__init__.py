"""ShadowKV and ShadowKV+ (Sun et al. 2024, arXiv 2410.21465).

Read the files in this order: `settings` and `records` (the settings), `state` (the arrays, with an example), `policy`
(the hooks of a layer), `selection` (how chunks are chosen), `landmarks` and `landmark_levels` (the summaries by which
they are chosen), `outliers` (chunks that stay exact), `key_codecs` (how keys are stored), `plus` (ShadowKV+).
"""

from jshadow.policies.shadowkv.plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.shadowkv.policy import ShadowKV as ShadowKV
from jshadow.policies.shadowkv.records import Choice as Choice
from jshadow.policies.shadowkv.records import ExactKeys as ExactKeys
from jshadow.policies.shadowkv.records import Keys as Keys
from jshadow.policies.shadowkv.records import Landmarks as Landmarks
from jshadow.policies.shadowkv.records import LowRank as LowRank
from jshadow.policies.shadowkv.records import TransformCode as TransformCode
from jshadow.policies.shadowkv.records import Values as Values
from jshadow.policies.shadowkv.reference import Quirks as Quirks
