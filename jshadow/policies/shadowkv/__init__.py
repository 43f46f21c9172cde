"""ShadowKV and ShadowKV+ (Sun et al. 2024, arXiv 2410.21465).

Read the files in this order: `settings`, `state` (the arrays, with an example), `policy` (the hooks of a layer),
`selection` (how chunks are chosen, which stay on the device, and which stay exact), `landmarks` (the summaries by which
they are chosen), `key_codecs` (how keys are stored), `costs` (bytes and operations), `plus` (ShadowKV+).
"""

from jshadow.policies.shadowkv.plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.shadowkv.policy import ShadowKV as ShadowKV
from jshadow.policies.shadowkv.settings import Choice as Choice
from jshadow.policies.shadowkv.settings import ExactKeys as ExactKeys
from jshadow.policies.shadowkv.settings import FromValues as FromValues
from jshadow.policies.shadowkv.settings import Keys as Keys
from jshadow.policies.shadowkv.settings import Landmarks as Landmarks
from jshadow.policies.shadowkv.settings import LowRank as LowRank
from jshadow.policies.shadowkv.settings import Quirks as Quirks
from jshadow.policies.shadowkv.settings import TransformCode as TransformCode
from jshadow.policies.shadowkv.settings import Values as Values
