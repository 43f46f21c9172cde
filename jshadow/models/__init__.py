"""The transformer and the model families. Nothing here knows a cache or a policy."""
