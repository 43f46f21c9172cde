"""Evaluations in parts: several processes run some of the samples each, and the parts are merged into one table."""

from jshadow.evaluation.parts.dealing import Part as Part
from jshadow.evaluation.parts.dealing import deal as deal
from jshadow.evaluation.parts.dealing import parse_part as parse_part
