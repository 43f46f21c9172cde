"""Speculation: a drafter proposes tokens, one turn of the model checks them, and wrong ones are given back.

No token changes: each proposed token is kept only if the model draws the same one.
"""

from jshadow.engine.speculation.drafter import Drafter as Drafter
from jshadow.engine.speculation.drafters import CompressedDraft as CompressedDraft
from jshadow.engine.speculation.drafters import DraftModel as DraftModel
from jshadow.engine.speculation.drafters import PromptLookup as PromptLookup
from jshadow.engine.speculation.drafters import SelfDraft as SelfDraft
from jshadow.engine.speculation.drafters import parse_drafter as parse_drafter
