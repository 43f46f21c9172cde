"""The transformer and the model families. This package does not depend on caches or policies."""
