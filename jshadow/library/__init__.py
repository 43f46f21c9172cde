"""A library of texts that a model has read once. Their KV states are kept in memory, on disk or in an object store."""

from jshadow.library.library import Library as Library
from jshadow.library.library import Reply as Reply
from jshadow.library.shelf import Stored as Stored
from jshadow.library.tiers import TierLimits as TierLimits
