"""Speculation: a drafter proposes tokens, one turn of the model checks them, and wrong ones are given back.

No token changes: each proposed token is kept only if the model draws the same one.
"""

from jshadow.engine.speculation.compressed_draft import CompressedDraft as CompressedDraft
from jshadow.engine.speculation.draft_model import DraftModel as DraftModel
from jshadow.engine.speculation.drafter import Drafter as Drafter
from jshadow.engine.speculation.parse import parse_drafter as parse_drafter
from jshadow.engine.speculation.prompt_lookup import PromptLookup as PromptLookup
from jshadow.engine.speculation.self_draft import SelfDraft as SelfDraft
